"""Linear layers on the CPU: weights are widened or decoded piece by piece, so that float32 copies never reach memory.

A float32 weight needs no kernel: the reference is already one product of PyTorch's library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hal.contract import Call
from hal.kernel import Claim, Range, Reason, kernel
from hal_cpu.kernels.common import (
    CARRIER,
    DECODED,
    FLOATS,
    activations_fp8,
    decode_e2m1,
    decode_e4m3,
    dense_product,
    product,
    scaled,
)
from hal_ops import formats

BLOCK = 128
#: K of one float32 product of INT8 codes: 1024 · 127² < 2^24, so every partial sum is an exact integer
_EXACT = 1024
_NARROW = Claim(dtypes={"x": FLOATS, "weight": CARRIER})


@kernel("linear_dense", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def linear_dense(x: Tensor, weight: Tensor) -> Tensor:
    """float32 accumulation over a weight that is widened in the cache; one row takes PyTorch's matrix-vector product."""
    if x.shape[0] == 1 and x.dtype == weight.dtype == torch.bfloat16:
        return F.linear(x, weight)  # widens in registers and accumulates in float32
    return dense_product(x, weight, x.dtype)


@kernel("lm_head", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`linear_dense`, logits kept in float32; widening the whole vocabulary at once would write 2 GiB per step."""
    return dense_product(x, weight, torch.float32)


@kernel("grouped_linear", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product per group, or one batched product where all groups together are small."""
    if weight.numel() <= DECODED:
        wide = torch.bmm(x.transpose(0, 1).to(torch.float32), weight.to(torch.float32).transpose(1, 2))
        return wide.transpose(0, 1).to(x.dtype, memory_format=torch.contiguous_format)
    out = torch.empty(x.shape[0], *weight.shape[:2], dtype=x.dtype)
    for g in range(weight.shape[0]):
        out[:, g] = linear_dense.fn(x[:, g], weight[g])
    return out


def narrow_output(call: Call) -> tuple[Reason, ...]:
    """float64 asks for a double-precision product, which these kernels do not compute."""
    dtype = call.scalars["dtype"]
    return () if dtype in FLOATS else (Reason("dtype", f"dtype is {dtype}, claimed bfloat16, float16, float32"),)


_SCALES = (torch.float8_e8m0fnu, torch.float32)
FP8 = Claim(dtypes={"x_scale": _SCALES, "weight_scale": _SCALES}, axes={"K": Range(multiple=BLOCK)})


def decoded_fp8(weight: Tensor, scale: Tensor) -> Callable[[slice, Tensor], object]:
    """``fill`` of an FP8 weight [N, K] with scales per 128x128."""

    def fill(part: slice, buffer: Tensor) -> None:
        blocks = formats.decode_scale(scale[part.start // BLOCK : -(-part.stop // BLOCK)])
        scaled(decode_e4m3(weight[part], buffer), blocks.repeat_interleave(BLOCK, 0)[: buffer.shape[0]])

    return fill


def decoded_fp4(weight: Tensor, scale: Tensor) -> Callable[[slice, Tensor], object]:
    """``fill`` of a packed FP4 weight [N, K/2] with scales per row and 32 of K."""
    return lambda part, buffer: scaled(decode_e2m1(weight[part], buffer), formats.decode_scale(scale[part]))


@kernel("matmul_fp8", claim=FP8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R1")
def matmul_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes decoded two at a look-up, scales multiplied in exactly, float32 accumulation."""
    return product(activations_fp8(x, x_scale), decoded_fp8(weight, weight_scale), weight.shape[0], dtype)


@kernel("matmul_fp4", claim=FP8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R1")
def matmul_fp4(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A byte is decoded to its two values at one look-up; otherwise as :func:`matmul_fp8`."""
    return product(activations_fp8(x, x_scale), decoded_fp4(weight, weight_scale), weight.shape[0], dtype)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Exact x int8 [T, K] times weightᵀ int8 [N, K], rounded once to float32 [T, N].

    Sums of 1024 products are exact in float32; longer ones are put together in float64, as the reference's are.
    """
    a, w = x.to(torch.float32), weight.to(torch.float32)
    if x.shape[1] <= _EXACT:
        return a @ w.T
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for start in range(0, x.shape[1], _EXACT):
        total += a[:, start : start + _EXACT] @ w[:, start : start + _EXACT].T
    return total.to(torch.float32)


INT8 = Claim(dtypes=dict.fromkeys(("x_scale", "weight_scale"), (torch.float32,)))


@kernel("matmul_int8", claim=INT8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R2")
def matmul_int8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Bitwise the reference's result: integer sums are exact in any order, so the batch does not matter either."""
    return (integer_product(x, weight) * x_scale * weight_scale).to(dtype)
