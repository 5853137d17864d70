"""Progress and the closing report of a run: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY_S = 0.1
_PLAIN_EVERY_S = 10.0


class Bar:
    """Progress on standard error; work shorter than a second shows nothing."""

    def __init__(self, label: str, unit: str) -> None:
        self.label, self.unit = label, unit
        self._start = self._last = time.monotonic()
        self._shown = False

    def update(self, done: int, total: int, name: str) -> None:
        """``done`` of ``total`` units, at ``name``."""
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._start < 1 or now - self._last < (_EVERY_S if terminal else _PLAIN_EVERY_S):
            return
        self._last, self._shown = now, True
        share = done / max(1, total)
        text = f"{self.label} {share:4.0%} {self._size(done)}/{self._size(total)} {name}"
        if terminal:
            filled = int(share * 24)
            sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (24 - filled)}] {text[:90]}")
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def update_count(self, done: int, total: int) -> None:
        """As :meth:`update`, without a name."""
        self.update(done, total, "")

    def close(self) -> None:
        """Clear the bar."""
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._shown = False

    def _size(self, n: int) -> str:
        from hal.device import format_bytes  # late: it brings torch, and an error in a flag should not wait for that

        return format_bytes(n) if self.unit == "B" else f"{n} {self.unit}"


def report_table(session: Any, tokens: int, seconds: float) -> str:
    """Receipts by operator and kernel, the arenas, and the speed of a run."""
    from hal.device import format_bytes

    rows = session.plan.receipts.rows()
    facts = session.services.facts()
    lines = [f"\nbackend {session.choice.backend.name} on {facts.name} ({session.choice.why})"]
    lines.append(f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s")
    lines.append(f"{'operator':<22} {'level':<10} {'calls':>8}  served by")
    lines += [f"{r.operator:<22} {r.level:<10} {r.calls:>8}  {r.chosen}" for r in rows]
    kernel = sum(r.calls for r in rows if r.via == "kernel")
    reference = session.plan.receipts.fallback_calls()
    lines.append(
        f"calls: {kernel} by kernels, {reference} by references; registry look-ups in steps: {session.plan.lookups}"
    )
    for a in session.arenas():
        parts = (format_bytes(n) for n in (a.used, a.peak, a.capacity))
        lines.append("{:<10} used {:>10}, peak {:>10}, capacity {:>10}".format(a.name, *parts))
    return "\n".join(lines)
