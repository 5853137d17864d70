"""Keep what foreign code prints away from our own output, without losing it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Collect all output of the block, of native code and child processes too; the list is filled when it ends.

    Python's stream objects stay in place where they write to the descriptors 1 and 2, so that a log handler made in
    the block works afterwards. Output of other threads in the meantime is collected as well.
    """
    out: list[str] = []
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
        for fd, name in ((1, "stdout"), (2, "stderr")):
            _redirect(stack, fd, name, file)
        try:
            yield out
        finally:
            stack.close()
            file.seek(0)
            text = file.read().decode(errors="replace").strip()
            out.extend([text] if text else [])


def _redirect(stack: contextlib.ExitStack, fd: int, name: str, file: IO[bytes]) -> None:
    stream = getattr(sys, name)
    if _fileno(stream) != fd:  # replaced by an object of its own, as test runners do
        buffer = io.TextIOWrapper(io.FileIO(os.dup(file.fileno()), "wb"), write_through=True)
        stack.enter_context(buffer)
        redirect = contextlib.redirect_stdout if name == "stdout" else contextlib.redirect_stderr
        stack.enter_context(redirect(buffer))
    else:
        stream.flush()
    with contextlib.suppress(OSError):  # the descriptor is closed: nothing to keep apart
        saved = os.dup(fd)
        os.dup2(file.fileno(), fd)
        stack.callback(_restore, stream, saved, fd)


def _restore(stream: Any, saved: int, fd: int) -> None:
    if stream is not None:
        stream.flush()
    os.dup2(saved, fd)
    os.close(saved)


def _fileno(stream: Any) -> int | None:
    try:
        return None if stream is None else int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None
