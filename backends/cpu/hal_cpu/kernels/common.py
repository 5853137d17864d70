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
#: rows that share a scale of an FP8 weight
ROWS = 128

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CARRIER = (torch.bfloat16, torch.float16)


def pieces(rows: int, width: int, limit: int = PIECE, multiple: int = 1) -> Iterator[slice]:
    """Slices of ``rows`` rows of ``width`` elements, each of about ``limit`` elements and whole ``multiple``s of rows."""
    step = max(multiple, limit // max(1, width) // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def product(x: Tensor, fill: Callable[[slice, Tensor], object], rows: int, dtype: torch.dtype) -> Tensor:
    """``x`` float32 [T, K] times the transpose of a weight [rows, K] -> ``dtype`` [T, rows].

    ``fill(part, buffer)`` writes the rows ``part`` of the weight, which begin at a multiple of 128, as float32.
    """
    count, width = x.shape
    if count == 0:
        return torch.empty(0, rows, dtype=dtype)
    parts = list(pieces(rows, width, DECODED, ROWS))
    buffer = torch.empty(min(rows, parts[0].stop), width)
    if len(parts) == 1:
        fill(parts[0], buffer)
        return (x @ buffer.T).to(dtype)
    out = torch.empty(count, rows, dtype=dtype)
    for part in parts:
        piece = buffer[: part.stop - part.start]
        fill(part, piece)
        out[:, part] = x @ piece.T
    return out


def dense_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, K] times the transpose of a dense weight [N, K], accumulated in float32 -> ``dtype`` [T, N]."""
    wide = x.to(torch.float32)
    if weight.numel() <= DECODED:
        return (wide @ weight.to(torch.float32).T).to(dtype)
    return product(wide, lambda part, buffer: buffer.copy_(weight[part]), weight.shape[0], dtype)


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


def decode_e4m3(codes: Tensor, out: Tensor) -> Tensor:
    """Codes FP8 [R, K], K even, contiguous -> ``out`` float32 [R, K]: the reference's table, two codes at a look-up."""
    index = codes.view(torch.uint8).view(-1).view(torch.uint16).to(torch.int32)
    torch.index_select(_pairs_e4m3(codes.dtype), 0, index, out=out.view(torch.int64).view(-1))
    return out


def decode_e2m1(packed: Tensor, out: Tensor) -> Tensor:
    """Packed E2M1 [R, K/2], contiguous -> ``out`` float32 [R, K]: the reference's table, one byte at a look-up."""
    torch.index_select(
        _pairs_e2m1(), 0, packed.view(torch.uint8).view(-1).to(torch.int32), out=out.view(torch.int64).view(-1)
    )
    return out


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply float32 [R, K] in place by ``scale`` [R or 1, K/block]."""
    blocks = scale.shape[-1]
    values.view(values.shape[0], blocks, values.shape[1] // max(1, blocks)).mul_(scale[..., None])
    return values


def activations_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Codes FP8 [T, K] with scales [T, K/block] -> float32 [T, K], exact."""
    return scaled(decode_e4m3(x, torch.empty(x.shape)), formats.decode_scale(scale))
