"""Device services: what the host needs from a chip besides kernels, and nothing more.

A backend returns one object that satisfies :class:`DeviceServices`. Units everywhere: bytes, seconds (``_s``),
milliseconds (``_ms``), bytes per second, FLOP/s. A multiplication and an addition are two FLOPs.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from hal.errors import BackendError, ContractError, UsageError

ALIGNMENT = 256
"""Bytes: every allocation and every arena view starts at a multiple of this address."""

COLLECTIVE_TIMEOUT_S = 600.0


def format_bytes(nbytes: float) -> str:
    """A size as people read it: ``"1.50 GiB"``; below one KiB ``"512 bytes"``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} bytes"


@dataclass(frozen=True)
class DeviceFacts:
    """What a device is, read from metadata.

    ``name``: marketing name; ``arch``: the architecture that claims speak of; ``memory_bytes``: all memory that this
    process may ever use; ``compute_units``: cores or multiprocessors usable; ``details``: further facts for reports.
    """

    name: str
    arch: str
    memory_bytes: int
    compute_units: int
    details: Mapping[str, str]


@dataclass(frozen=True)
class Ceilings:
    """The best rates that this device showed when measured, never typed in: the roofline's two lines.

    ``copy_bytes_per_s``: bytes read plus bytes written per second by a large copy; ``read_bytes_per_s``: bytes read
    per second by a large reduction; ``matrix_flops``: dtype name (``"bfloat16"``) -> FLOP/s of a large matrix
    product; ``measured_at``: ISO date in UTC; ``seconds``: what the measurement took.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    matrix_flops: Mapping[str, float]
    measured_at: str
    seconds: float


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of the work issued so far to ``stream`` (default: the current one)."""
        ...

    def wait(self) -> None:
        """Block the host until the recorded work is done; an event never recorded returns at once."""
        ...

    def query(self) -> bool:
        """Whether the recorded work is done, without blocking; true if never recorded."""
        ...

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds of device time from this event to ``end``; both recorded, done and made with ``timing``.

        Raises:
            ContractError: an event was made without timing, was not recorded, or is of another device.
        """
        ...


@runtime_checkable
class Stream(Protocol):
    """An in-order queue of work. ``with stream:`` makes it the current one in this context."""

    def wait(self, event: Event) -> None:
        """Hold back work issued to this stream from now on until ``event`` is done; does not block the host."""
        ...

    def synchronize(self) -> None:
        """Block the host until everything issued to this stream is done."""
        ...

    def __enter__(self) -> Stream: ...

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


@runtime_checkable
class Graph(Protocol):
    """A captured sequence of launches at fixed addresses."""

    def replay(self) -> Any:
        """Issue the captured work to the current stream; returns what the captured function returned, rewritten."""
        ...


@runtime_checkable
class Collective(Protocol):
    """Communication among ``world_size`` ranks; every rank calls the same methods in the same order.

    Every method raises BackendError when a rank is lost or does not answer in time, naming method, rank and cause.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, x: torch.Tensor, op: Literal["sum", "max", "min"] = "sum") -> None:
        """Replace ``x``, contiguous, same shape and dtype on every rank, by its reduction over the ranks."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[world_size, *x.shape]``, rank r's ``x`` at index r; any dtype, bits unchanged."""
        ...

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """``x[world_size, ...]``: send ``x[r]`` to rank r; returns the same shape, index r coming from rank r."""
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Overwrite ``x``, contiguous, on every rank with that of rank ``source``; any dtype, bits unchanged."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...

    def close(self) -> None:
        """Leave the group; the object is of no use afterwards."""
        ...


@runtime_checkable
class DeviceServices(Protocol):
    """Everything that the host asks of one device."""

    @property
    def device(self) -> torch.device:
        """The torch device, with its index where the type has one."""
        ...

    @property
    def supports_graphs(self) -> bool:
        """Whether :meth:`graph` works."""
        ...

    def facts(self) -> DeviceFacts:
        """Name, architecture and sizes; no measurement, no allocation."""
        ...

    def free_bytes(self) -> int:
        """Bytes that :meth:`allocate` can be expected to grant now, under every limit set on this process."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A new ``uint8[nbytes]`` whose address is a multiple of :data:`ALIGNMENT`; contents are *undefined*.

        Raises:
            MemoryLimitError: not that much is free; the message names needed and free.
            ContractError: ``nbytes`` is negative.
        """
        ...

    def synchronize(self) -> None:
        """Block the host until all work of all streams is done; raises what that work failed with."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def current_stream(self) -> Stream:
        """The stream that work issued now goes to."""
        ...

    def event(self, timing: bool = False) -> Event:
        """A new event; only events with ``timing`` can measure."""
        ...

    def timer(self) -> Timer:
        """``with services.timer() as t: ...`` then ``t.ms``: device time of the work issued inside."""
        ...

    def graph(self, fn: Callable[[], Any]) -> Graph:
        """Capture the work that ``fn()`` issues. ``fn`` has been run before (nothing left to compile or to grow).

        Raises:
            ContractError: the device has no graphs (ask :attr:`supports_graphs` first), or ``fn`` cannot be captured.
        """
        ...

    def random_state(self) -> torch.Tensor:
        """The state of the device's default generator, a ``uint8`` tensor on the host."""
        ...

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`random_state` returned."""
        ...

    def ceilings(self) -> Ceilings:
        """Measure the device now or return what this object measured before; takes seconds the first time."""
        ...

    def collective(
        self, world_size: int, rank: int, init_method: str, timeout_s: float = COLLECTIVE_TIMEOUT_S
    ) -> Collective:
        """Join the group of ``world_size`` ranks that meet at ``init_method`` (``tcp://HOST:PORT``, ``file:///PATH``).

        Raises:
            UsageError: rank or world size out of range, or this process is already in a group.
            BackendError: the ranks did not meet within ``timeout_s`` seconds.
        """
        ...


class Timer(AbstractContextManager["Timer"]):
    """Device time of a block, from two events of ``services``; leaving the block waits for its work."""

    def __init__(self, services: DeviceServices) -> None:
        self._start, self._end = services.event(timing=True), services.event(timing=True)
        self._ms: float | None = None

    def __enter__(self) -> Timer:
        self._ms = None
        self._start.record()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._end.record()
        self._end.wait()
        self._ms = self._start.elapsed_ms(self._end)

    @property
    def ms(self) -> float:
        """Milliseconds; ContractError before the block has ended."""
        if self._ms is None:
            raise ContractError("timer: ms was read before the timed block ended")
        return self._ms


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: libraries move uint8, not every dtype of ours."""
    return x.view(-1).view(torch.uint8)


def _check_dense(what: str, x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ContractError(
            f"collective {what}: strides {list(x.stride())}, right is contiguous: it is written in place"
        )


class TorchCollective:
    """:class:`Collective` over ``torch.distributed`` with its backend ``library`` (``gloo``, ``nccl``, ``hccl``)."""

    def __init__(self, library: str, world_size: int, rank: int, init_method: str, timeout_s: float) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise UsageError(f"collective: rank {rank} of world size {world_size}; right is 0 <= rank < world size")
        if dist.is_initialized():
            raise UsageError("collective: this process is already in a group; close it first")
        self.world_size, self.rank = world_size, rank
        self._where = f"rank {rank} of {world_size} ({library}, {init_method}, timeout {timeout_s:g} s)"
        self._run(
            "join",
            dist.init_process_group,
            library,
            init_method=init_method,
            world_size=world_size,
            rank=rank,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def _run(self, what: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            fn(*args, **kwargs)
        except (RuntimeError, ValueError) as e:  # torch.distributed raises both, for lost ranks and bad addresses
            cause = (str(e).splitlines() or [type(e).__name__])[0]
            raise BackendError(f"collective {what}: {self._where}: {cause}") from e

    def all_reduce(self, x: torch.Tensor, op: Literal["sum", "max", "min"] = "sum") -> None:
        """See :class:`Collective`."""
        if op not in _REDUCTIONS:
            raise ContractError(f"collective all_reduce: op {op!r} is none of {', '.join(_REDUCTIONS)}")
        _check_dense("all_reduce", x)
        self._run("all_reduce", dist.all_reduce, x, _REDUCTIONS[op])

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Collective`."""
        out = x.new_empty((self.world_size, *x.shape))
        parts = list(_as_bytes(out).view(self.world_size, -1).unbind())
        self._run("all_gather", dist.all_gather, parts, _as_bytes(x.contiguous()))
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Collective`."""
        if not x.shape or x.shape[0] != self.world_size:
            raise ContractError(f"collective all_to_all: shape {list(x.shape)}, right is [{self.world_size}, ...]")
        out = x.new_empty(x.shape)
        self._run("all_to_all", dist.all_to_all_single, _as_bytes(out), _as_bytes(x.contiguous()))
        return out

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See :class:`Collective`."""
        if not 0 <= source < self.world_size:
            raise ContractError(f"collective broadcast: source {source}, right is 0 to {self.world_size - 1}")
        _check_dense("broadcast", x)
        self._run("broadcast", dist.broadcast, _as_bytes(x), source)

    def barrier(self) -> None:
        """See :class:`Collective`."""
        self._run("barrier", dist.barrier)

    def close(self) -> None:
        """See :class:`Collective`."""
        dist.destroy_process_group()
