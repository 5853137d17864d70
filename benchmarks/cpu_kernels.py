"""Speed of the CPU backend's kernels against the references, interleaved in one run on this machine.

Prints, per kernel and sample, the median time of the reference and the median of the paired ratios reference/kernel. Run it as
``python benchmarks/cpu_kernels.py [--ops NAME,NAME] [--repeats N] [--full]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hal import plugins
from hal.kernel import Kernel
from hal.operator import OPERATORS, Sample


def seconds(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Seconds of one call; ``args`` is copied first where the call writes to it."""
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def compare(kernel: Kernel, args: tuple[Any, ...], repeats: int) -> tuple[float, float]:
    """(median seconds of the reference, median ratio reference/kernel) over pairs whose order alternates."""
    sides = (OPERATORS[kernel.operator].fn, kernel.fn)
    for fn in sides:
        fn(*args)
    pairs: list[tuple[float, float]] = []
    for i in range(repeats):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        took = {side: seconds(sides[side], args) for side in order}
        pairs.append((took[0], took[1]))
    return statistics.median(r for r, _ in pairs), statistics.median(r / k for r, k in pairs)


def samples(kernel: Kernel, arch: str, full: bool) -> Iterator[tuple[Sample, tuple[Any, ...]]]:
    """Samples of the normal family that the kernel claims, without those that hold no token."""
    op = OPERATORS[kernel.operator]
    for sample in op.samples():
        if sample.family != "normal" or (sample.full and not full) or 0 in sample.axes.values():
            continue
        args = sample.make()
        if not kernel.reasons(op.contract.call(args, {}), arch):
            yield sample, args


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="operators, separated by commas; all by default")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of timed calls per sample")
    parser.add_argument("--full", action="store_true", help="the long samples too")
    options = parser.parse_args()
    backend = plugins.load().named("cpu", "benchmark")
    arch = backend.probe.devices[0].arch if backend.probe and backend.probe.devices else "unknown"
    chosen = [name for name in options.ops.split(",") if name]
    print(f"{arch}, torch {torch.__version__}, {torch.get_num_threads()} threads, {options.repeats} interleaved pairs")
    with torch.inference_mode():
        for name, kernels in backend.kernels().items():
            for kernel in kernels if not chosen or name in chosen else ():
                for sample, args in samples(kernel, arch, options.full):
                    base, ratio = compare(kernel, args, options.repeats)
                    print(f"{name:22} {sample.id:42} {base * 1e3:10.3f} ms  x{ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
