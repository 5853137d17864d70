"""Bit-portable random numbers: integer arithmetic on a counter, so that every machine draws the same bytes.

Element i of a key is SplitMix64's finaliser of ``hash(key) + i·golden``; no transcendental function is used, since math
libraries differ between platforms. Normal values are sums of sixteen 16-bit integers (Irwin-Hall), scaled exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hal.errors import InputError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIELDS = np.uint64(0x0000FFFF0000FFFF)
#: words made at a time: the work stays in the processor's cache
_CHUNK = 1 << 15


def _seed(key: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))


def _words(seed: np.uint64, start: int, count: int) -> np.ndarray:
    """Words ``start`` … ``start + count`` of a seed, uint64 [count]."""
    with np.errstate(over="ignore"):
        x = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
        x *= _GOLDEN
        x += seed
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return x


def _stream(key: str, count: int) -> np.ndarray:
    """The first ``count`` words of ``key``, uint64."""
    out, seed = np.empty(count, dtype=np.uint64), _seed(key)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        out[start : start + size] = _words(seed, start, size)
    return out


def bits(key: str, count: int) -> np.ndarray:
    """``count`` random uint32 of ``key``: the upper half of every word."""
    return (_stream(key, count) >> np.uint64(32)).astype(np.uint32)


def uniform(key: str, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
    """float32 [shape] from ``low`` to ``high``: a 24-bit integer over 2^24, then one float32 multiplication and addition.

    ``high`` itself comes out only where the addition rounds up to it.
    """
    unit = (bits(key, math.prod(shape)) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return torch.from_numpy((unit * np.float32(high - low) + np.float32(low)).reshape(tuple(shape)))


def normal(key: str, shape: Sequence[int]) -> Tensor:
    """float32 [shape], mean 0, variance 1 (Irwin-Hall of 16, so within ±7): integer sum, one exact power-of-two scaling
    and one float32 multiplication."""
    count, seed = math.prod(shape), _seed(key)
    out = np.empty(count, dtype=np.float32)
    for start in range(0, count, _CHUNK // 4):
        size = min(_CHUNK // 4, count - start)
        words = _words(seed, 4 * start, 4 * size)
        # four 16-bit fields a word, summed two by two in its 32-bit halves
        halves = ((words & _FIELDS) + ((words >> np.uint64(16)) & _FIELDS)).reshape(-1, 4).sum(axis=1)
        total = (halves & np.uint64(0xFFFFFFFF)).astype(np.int64) + (halves >> np.uint64(32)).astype(np.int64)
        out[start : start + size] = (total - 8 * 65535).astype(np.float32) * np.float32(2.0**-16)
    # variance of a 16-bit uniform in units of 2^16 is 1/12, so sixteen of them have deviation sqrt(4/3)
    return torch.from_numpy((out * np.float32(0.8660254)).reshape(tuple(shape)))


def integers(key: str, shape: Sequence[int], low: int, high: int) -> Tensor:
    """int64 [shape] in [low, high), by modulo (bias below 2^-30 for ranges up to 2^34).

    Raises:
        InputError: the range is empty and ``shape`` is not.
    """
    count = math.prod(shape)
    if high <= low and count:
        raise InputError(f"integers from low = {low} to high = {high}, right is high > low")
    words = _stream(key, count) % np.uint64(max(1, high - low))
    return torch.from_numpy(words.astype(np.int64).reshape(tuple(shape))) + low


def permutation(key: str, count: int) -> Tensor:
    """A permutation of range(count), int64: the stable order of ``count`` words."""
    return torch.from_numpy(np.argsort(_stream(key, count), kind="stable").astype(np.int64))


#: zeros of both signs, block maxima of both formats and their neighbours, subnormals, magnitudes far apart, powers of two
_SPECIAL = np.array(
    [0.0, -0.0, 447.0, 449.0, 6.0, 3.5, 1e-4, -2.5, 1e4, 1e-30, -1e-30, 2.0**-127, -(2.0**-130), 2.0**-149]
    + [sign * 448.0 * 2.0**k for k in (-16, -8, -1, 0, 1, 8) for sign in (1, -1)]
    + [sign * 2.0**k for k in range(-12, 12) for sign in (1, -1)],
    dtype=np.float32,
)


def _outliers(key: str, shape: Sequence[int]) -> Tensor:
    factor = torch.ones(shape[-1])
    factor[permutation(f"{key}/channels", shape[-1])[:8]] = 50.0
    return normal(key, shape) * factor


def _rows(key: str, shape: Sequence[int]) -> Tensor:
    rows = np.arange(math.prod(shape[:-1]), dtype=np.int32) % 24 - 20
    factor = np.ldexp(np.float32(1), rows).astype(np.float32)
    return normal(key, shape) * torch.from_numpy(factor.reshape(*shape[:-1], 1))


def _adversarial(key: str, shape: Sequence[int]) -> Tensor:
    values = torch.from_numpy(_SPECIAL)[integers(key, shape, 0, len(_SPECIAL))]
    return values.masked_fill(uniform(f"{key}/zero", (*shape[:-1], 1)) < 0.1, 0.0)


_FAMILIES: dict[str, Callable[[str, Sequence[int]], Tensor]] = {
    "normal": normal,
    "positive": lambda key, shape: normal(key, shape).abs(),
    "outliers": _outliers,
    "rows": _rows,
    "adversarial": _adversarial,
}


def draw(family: str, key: str, shape: Sequence[int]) -> Tensor:
    """float32 [shape], at least one axis, of an input family.

    ``normal``; ``positive`` (absolute values: accumulator bias shows); ``outliers`` (eight channels x50); ``rows`` (rows
    scaled by 2^-20 … 2^3 in turn: faults in small rows show); ``adversarial`` (zeros of both signs, subnormals, block
    maxima, powers of two; a tenth of the rows are zero).

    Raises:
        InputError: unknown family.
    """
    if family not in _FAMILIES:
        raise InputError(f"input family {family!r} is unknown, right is one of {', '.join(_FAMILIES)}")
    return _FAMILIES[family](key, shape)
