"""Measured ceilings of the CPU: bandwidth and matrix rates that PyTorch reaches here, within three seconds."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable

import torch

from hal.contract import dtype_name
from hal.device import Ceilings

BUDGET_S = 0.25
"""Seconds that one measurement may take; seven of them, with their first touches, stay below three seconds."""

MIN_BUFFER, MAX_BUFFER = 64 << 20, 1 << 30
LARGEST_MATRIX = 4096
LONG_ENOUGH_S = 0.01


def seconds_per_call(fn: Callable[[], object], budget_s: float = BUDGET_S, repeats: int = 9) -> float:
    """Median seconds of up to ``repeats`` calls of ``fn`` after one unmeasured call; fewer when the budget is spent."""
    fn()
    times: list[float] = []
    while len(times) < repeats and sum(times) < budget_s:
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def buffer_bytes(cache_bytes: int, free_bytes: int) -> int:
    """Bytes of the bandwidth buffer: four times the last-level cache, bounded by 1 GiB and 1/8 of what is free."""
    wanted = min(max(4 * cache_bytes, MIN_BUFFER), MAX_BUFFER, free_bytes // 8)
    return max(wanted // 4096 * 4096, 4096)


def bandwidth(nbytes: int) -> tuple[float, float]:
    """(copied, read) bytes per second over a buffer of ``nbytes``; a copied byte counts twice, read and written."""
    source = torch.ones(nbytes // 4, dtype=torch.float32)
    target = torch.ones_like(source)
    integers = source.view(torch.int64)
    copy_s = seconds_per_call(lambda: target.copy_(source))
    # Two reductions, since a ceiling must not be limited by the arithmetic of one of them.
    read_s = min(seconds_per_call(lambda: torch.sum(source)), seconds_per_call(lambda: torch.sum(integers)))
    return 2 * source.nbytes / copy_s, source.nbytes / read_s


def _product(dtype: torch.dtype, n: int) -> Callable[[], torch.Tensor]:
    if dtype == torch.int8:
        a = torch.ones(n, n, dtype=torch.int8)
        return lambda: torch._int_mm(a, a)
    b = torch.full((n, n), 0.5, dtype=dtype)
    return lambda: b @ b


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square product of ``dtype``, the best median over sizes doubled until one call takes 10 ms."""
    n, best = 128, 0.0
    while n <= LARGEST_MATRIX:
        seconds = seconds_per_call(_product(dtype, n), BUDGET_S / 4, repeats=5)
        best = max(best, 2 * n**3 / seconds)
        if seconds > LONG_ENOUGH_S:  # the next size takes eight times as long
            break
        n *= 2
    return best


def matrix_rates() -> dict[str, float]:
    """FLOP/s by dtype name. A narrow dtype is never rated below a wider one: a kernel may widen its values."""
    rates: dict[str, float] = {}
    floor = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        floor = max(floor, matrix_rate(dtype))
        rates[dtype_name(dtype)] = floor
    return rates


def measure(cache_bytes: int, free_bytes: int) -> Ceilings:
    """Measure this process with its present threads; ``cache_bytes`` is the last-level cache of its CPUs."""
    start = time.perf_counter()
    copied, read = bandwidth(buffer_bytes(cache_bytes, free_bytes))
    rates = matrix_rates()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Ceilings(copied, read, rates, today, time.perf_counter() - start)
