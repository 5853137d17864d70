"""Bit-portable random numbers: integer arithmetic on a counter, so that every machine draws the same bytes.

Element i of a key is SplitMix64's finaliser of ``hash(key) + i·golden``; no transcendental function is used, since math
libraries differ between platforms. Normal values are sums of sixteen 16-bit integers (Irwin-Hall), scaled exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def bits(key: str, count: int) -> np.ndarray:
    """``count`` uint64 words of ``key``."""
    seed = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    with np.errstate(over="ignore"):
        x = seed + (np.arange(1, count + 1, dtype=np.uint64)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform(key: str, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
    """float32 [shape] in [low, high): a 24-bit integer scaled by a power of two, then one float32 multiply-add."""
    unit = (bits(key, math.prod(shape)) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return torch.from_numpy(unit.reshape(tuple(shape))) * (high - low) + low


def normal(key: str, shape: Sequence[int]) -> Tensor:
    """float32 [shape], mean 0, variance 1 (Irwin-Hall of 16, so within ±7): integer sum, one exact power-of-two scaling
    and one float32 multiplication."""
    words = bits(key, 4 * math.prod(shape)).reshape(-1, 4)
    total = np.zeros(len(words), dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64).sum(axis=1)
    centred = (total - 8 * 65535).astype(np.float32) * np.float32(2.0**-16)
    # variance of a 16-bit uniform in units of 2^16 is 1/12, so sixteen of them have deviation sqrt(4/3)
    return torch.from_numpy((centred * np.float32(0.8660254)).reshape(tuple(shape)))


def integers(key: str, shape: Sequence[int], low: int, high: int) -> Tensor:
    """int64 [shape] in [low, high), by modulo (bias below 2^-30 for ranges up to 2^34)."""
    words = bits(key, math.prod(shape)) % np.uint64(max(1, high - low))
    return torch.from_numpy(words.astype(np.int64).reshape(tuple(shape))) + low


def permutation(key: str, count: int) -> Tensor:
    """A permutation of range(count), int64: the stable order of ``count`` words."""
    return torch.from_numpy(np.argsort(bits(key, count), kind="stable"))


_SPECIAL = np.array(
    [0.0, -0.0, 448.0, -448.0, 449.0, 447.0, 1.0, -1.0, 2.0**-9, -(2.0**-10), 1e-30, -1e-30, 6.0, 3.5, 1e-4, -2.5, 1e4]
    + [2.0**n for n in range(-12, 12)],
    dtype=np.float32,
)


def draw(family: str, key: str, shape: Sequence[int]) -> Tensor:
    """float32 [shape] of an input family.

    ``normal``; ``positive`` (absolute values: accumulator bias shows); ``outliers`` (eight channels x50); ``rows`` (rows
    scaled by 2^-20 … 2^3: faults in small rows show); ``adversarial`` (zeros of both signs, block maxima, powers of two).

    Raises:
        ValueError: unknown family.
    """
    if family == "adversarial":
        index = integers(key, shape, 0, len(_SPECIAL))
        rowwise = uniform(f"{key}/zero", shape[:-1]) < 0.1 if len(shape) > 1 else torch.tensor(False)
        return torch.from_numpy(_SPECIAL)[index].masked_fill(rowwise[..., None] if rowwise.dim() else rowwise, 0.0)
    x = normal(key, shape)
    if family == "normal":
        return x
    if family == "positive":
        return x.abs()
    if family == "outliers":
        channels = integers(f"{key}/channels", (8,), 0, max(1, shape[-1]))
        return x * (1 + 49 * torch.zeros(shape[-1]).index_fill(0, channels, 1.0)) if shape[-1] else x
    if family == "rows":
        rows = math.prod(shape[:-1])
        power = torch.ldexp(torch.ones(rows), torch.arange(rows) % 24 - 20)
        return x * power.view(*shape[:-1], 1)
    raise ValueError(f"input family {family!r} is unknown")
