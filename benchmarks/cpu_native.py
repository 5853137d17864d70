"""The native bfloat16 linear of the CPU backend against the portable one, interleaved; meaningful where the CPU has it.

python benchmarks/cpu_native.py [--threads N] [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from hal_cpu.features import cpu_features
from hal_cpu.kernels import linear, native

TOKENS = (1, 2, 4, 16, 64, 512)
WEIGHTS = ((1024, 4096), (4096, 4096))


def pair(x: torch.Tensor, w: torch.Tensor) -> tuple[float, float]:
    """Seconds of the native and of the portable kernel, one call each."""
    start = time.perf_counter()
    native.linear_dense.fn(x, w)
    middle = time.perf_counter()
    linear.linear_dense.fn(x, w)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{cpu_features().name} ({cpu_features().arch}), torch {torch.__version__}, {options.threads} threads")
    print(f"{'T':<5}{'N':<6}{'K':<6}{'native ms':>10}{'portable/native':>17}")
    for tokens in TOKENS:
        for n, k in WEIGHTS:
            x, w = torch.randn(tokens, k).bfloat16(), (torch.randn(n, k) * k**-0.5).bfloat16()
            pair(x, w)
            pairs = [pair(x, w) for _ in range(options.repeats)]
            ms = statistics.median(a for a, _ in pairs) * 1e3
            ratio = statistics.median(b / a for a, b in pairs)
            print(f"{tokens:<5}{n:<6}{k:<6}{ms:>10.3f}{ratio:>17.2f}")


if __name__ == "__main__":
    main()
