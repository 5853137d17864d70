"""What the CPU kernels share: work in pieces that stay in the cache, and products with rows that are decoded on the way.

Fresh buffers of some MiB cost more in page faults than the arithmetic done in them, hence the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from hal_ops import formats

#: elements of one piece of an element-wise pass: a few float32 temporaries fit the second-level cache
PIECE = 1 << 15
#: elements of one decoded piece of a weight: it is read again at once by the product
DECODED = 1 << 20

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CARRIER = (torch.bfloat16, torch.float16)


def pieces(rows: int, width: int, limit: int = PIECE, multiple: int = 1) -> Iterator[slice]:
    """Slices of ``rows`` rows of ``width`` elements, each of about ``limit`` elements and whole ``multiple``s of rows."""
    step = max(multiple, limit // max(1, width) // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def product(x: Tensor, rows_of: Callable[[slice], Tensor], rows: int, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    """``x`` float32 [T, K] times the transpose of a weight whose float32 rows ``rows_of`` yields -> ``dtype`` [T, rows]."""
    out = torch.empty(x.shape[0], rows, dtype=dtype)
    if x.shape[0]:
        for part in pieces(rows, x.shape[1], DECODED, multiple):
            out[:, part] = x @ rows_of(part).T
    return out


@lru_cache(maxsize=2)
def _pairs_e4m3(dtype: torch.dtype) -> Tensor:
    """For two adjacent codes, read as one little-endian 16-bit number, their two float32 values as int64 [65536]."""
    both = torch.arange(1 << 16, dtype=torch.int32)
    codes = torch.stack((both & 255, both >> 8), dim=-1).to(torch.uint8).view(dtype)
    return formats.decode_e4m3(codes).view(torch.int64)[:, 0].contiguous()


@lru_cache(maxsize=1)
def _pairs_e2m1() -> Tensor:
    """For one byte of two codes their two float32 values as int64 [256]."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return formats.unpack_e2m1(byte[:, None]).view(torch.int64)[:, 0].contiguous()


def decode_e4m3(codes: Tensor) -> Tensor:
    """Codes FP8 [R, K], K even, contiguous -> float32 [R, K]: the reference's table, two codes at a look-up."""
    index = codes.view(torch.uint8).flatten().view(torch.uint16).to(torch.int32)
    return _pairs_e4m3(codes.dtype).index_select(0, index).view(torch.float32).view(codes.shape)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Packed E2M1 [R, K/2], contiguous -> float32 [R, K]: the reference's table, one byte at a look-up."""
    index = packed.view(torch.uint8).flatten().to(torch.int32)
    return _pairs_e2m1().index_select(0, index).view(torch.float32).view(packed.shape[0], -1)


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply float32 [R, K] in place by ``scale`` [R or 1, K/block]."""
    blocks = scale.shape[-1]
    values.view(values.shape[0], blocks, values.shape[1] // max(1, blocks)).mul_(scale[..., None])
    return values


def activations_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Codes FP8 [T, K] with scales [T, K/block] -> float32 [T, K], exact."""
    return scaled(decode_e4m3(x), formats.decode_scale(scale))
