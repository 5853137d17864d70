"""Linear layers on the CPU: weights are widened or decoded piece by piece, so that float32 copies never reach memory.

A float32 weight needs no kernel: the reference is already one product of PyTorch's library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.contract import Call
from hal.kernel import Claim, Range, Reason, kernel
from hal_cpu.kernels.common import CARRIER, FLOATS, activations_fp8, decode_e2m1, decode_e4m3, product, scaled
from hal_ops import formats

BLOCK = 128
#: K of one float32 product of INT8 codes: 1024 · 127² < 2^24, so every partial sum is an exact integer
_EXACT = 1024
_NARROW = Claim(dtypes={"x": FLOATS, "weight": CARRIER})


@kernel("linear_dense", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def linear_dense(x: Tensor, weight: Tensor) -> Tensor:
    """float32 accumulation over a weight that is widened in the cache."""
    return product(x.to(torch.float32), lambda part: weight[part].to(torch.float32), weight.shape[0], x.dtype)


@kernel("linear_fp32", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`linear_dense`, the result kept in float32."""
    return product(x.to(torch.float32), lambda part: weight[part].to(torch.float32), weight.shape[0], torch.float32)


@kernel("lm_head", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`linear_fp32`: widening the whole vocabulary at once would write 2 GiB per step."""
    return product(x.to(torch.float32), lambda part: weight[part].to(torch.float32), weight.shape[0], torch.float32)


@kernel("grouped_linear", claim=_NARROW, priority=10, evidence="hardware", reproducibility="R1")
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product per group."""
    out = torch.empty(x.shape[0], *weight.shape[:2], dtype=x.dtype)
    for g in range(weight.shape[0]):
        out[:, g] = product(
            x[:, g].to(torch.float32), lambda part, w=weight[g]: w[part].to(torch.float32), weight.shape[1], x.dtype
        )
    return out


def narrow_output(call: Call) -> tuple[Reason, ...]:
    """float64 asks for a double-precision product, which these kernels do not compute."""
    dtype = call.scalars["dtype"]
    return () if dtype in FLOATS else (Reason("dtype", f"dtype is {dtype}, claimed bfloat16, float16, float32"),)


_SCALES = (torch.float8_e8m0fnu, torch.float32)
_FP8 = Claim(dtypes={"x_scale": _SCALES, "weight_scale": _SCALES}, axes={"K": Range(multiple=BLOCK)})


def rows_fp8(weight: Tensor, scale: Tensor, part: slice) -> Tensor:
    """Rows ``part`` (from a multiple of 128) of an FP8 weight [N, K] with scales per 128x128 -> float32."""
    blocks = scale[part.start // BLOCK : -(-part.stop // BLOCK)]
    wide = formats.decode_scale(blocks).repeat_interleave(BLOCK, 0)[: part.stop - part.start]
    return scaled(decode_e4m3(weight[part]), wide)


def rows_fp4(weight: Tensor, scale: Tensor, part: slice) -> Tensor:
    """Rows ``part`` of a packed FP4 weight [N, K/2] with scales per row and 32 of K -> float32."""
    return scaled(decode_e2m1(weight[part]), formats.decode_scale(scale[part]))


@kernel("matmul_fp8", claim=_FP8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R1")
def matmul_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes decoded two at a look-up, scales multiplied in exactly, float32 accumulation."""
    a = activations_fp8(x, x_scale)
    return product(a, lambda part: rows_fp8(weight, weight_scale, part), weight.shape[0], dtype, BLOCK)


@kernel("matmul_fp4", claim=_FP8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R1")
def matmul_fp4(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A byte is decoded to its two values at one look-up; otherwise as :func:`matmul_fp8`."""
    a = activations_fp8(x, x_scale)
    return product(a, lambda part: rows_fp4(weight, weight_scale, part), weight.shape[0], dtype)


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


@kernel("matmul_int8", refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R2")
def matmul_int8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Bitwise the reference's result: integer sums are exact in any order, so the batch does not matter either."""
    total = product(x, lambda part: weight[part], 0, dtype) if not x.shape[0] else integer_product(x, weight)
    return (total * x_scale * weight_scale).to(dtype)
