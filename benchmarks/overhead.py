"""What a bound operator call costs over calling the kernel itself, beside a plain Python call in the same run.

    python benchmarks/overhead.py [--json FILE]

Interleaved repeats; medians. The kernel does nothing, so that only the way to it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hal_ops
from hal.dispatch import lookups
from hal.kernel import kernel
from hal.operator import OPERATORS
from hal.plan import Bucket, bind

CALLS, REPEATS = 20_000, 31


def _nothing(x: Any, weight: Any, eps: Any) -> Any:  # noqa: ARG001
    return x


class _One:
    """A model of one operator call."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths

    def buckets(self) -> list[Bucket]:
        return [Bucket("decode", 1, 1)]

    def trace(self, bucket: Bucket, tokens: int) -> None:  # noqa: ARG002
        for width in self.widths:
            hal_ops.rms_norm(torch.empty(tokens, width, device="meta"), torch.empty(width, device="meta"), 1e-6)


def _timed(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        fn(*args)
    return (time.perf_counter_ns() - start) / CALLS


def measure() -> dict[str, float]:
    """Nanoseconds per call (medians) and the figures derived from them."""
    claimed = kernel("rms_norm", evidence="hardware")(_nothing)
    plan = bind(_One((64,)), "bench", {"rms_norm": (claimed,)}, "any")
    args = (torch.zeros(1, 64), torch.ones(64), 1e-6)
    times: dict[str, list[float]] = {"plain call": [], "kernel": [], "bound operator": []}
    before = lookups()
    with plan.active(Bucket("decode", 1, 1)):
        for _ in range(REPEATS):
            times["plain call"].append(_timed(lambda a, b, c: a, args))  # noqa: ARG005
            times["kernel"].append(_timed(_nothing, args))
            times["bound operator"].append(_timed(hal_ops.rms_norm, args))
    out = {f"{k}, ns": statistics.median(v) for k, v in times.items()}
    out["overhead, ns"] = out["bound operator, ns"] - out["kernel, ns"]
    out["overhead / plain call"] = out["overhead, ns"] / out["plain call, ns"]
    out["registry look-ups"] = lookups() - before
    out["operators"] = len(OPERATORS)
    return out


def main() -> None:
    """Print and optionally store the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name:<24} {value:10.2f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
