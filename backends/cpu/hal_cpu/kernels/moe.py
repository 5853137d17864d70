"""Mixture of experts on the CPU: each expert's weight is widened or decoded in the cache; experts without rows are not read."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from hal.kernel import Claim, kernel
from hal_cpu.kernels.common import CARRIER, FLOATS, activations_fp8, product
from hal_cpu.kernels.linear import (
    FP8,
    INT8,
    decoded_fp4,
    decoded_fp8,
    integer_product,
    linear_dense,
    narrow_output,
)


def _per_expert(offsets: Tensor, out: Tensor, rows_of: Callable[[int, slice], Tensor]) -> Tensor:
    for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if end > start:
            out[start:end] = rows_of(e, slice(start, end))
    return out


@kernel(
    "grouped_matmul_dense",
    claim=Claim(dtypes={"x": FLOATS, "weight": CARRIER}),
    priority=10,
    evidence="hardware",
    reproducibility="R1",
)
def grouped_matmul_dense(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One dense product per expert that owns rows."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    return _per_expert(offsets, out, lambda e, rows: linear_dense.fn(x[rows], weight[e]))


@kernel("grouped_matmul_fp4", claim=FP8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R1")
def grouped_matmul_fp4(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """One FP4 product per expert that owns rows."""
    a, n = activations_fp8(x, x_scale), weight.shape[1]
    out = torch.empty(x.shape[0], n, dtype=dtype)
    return _per_expert(
        offsets, out, lambda e, rows: product(a[rows], decoded_fp4(weight[e], weight_scale[e]), n, dtype)
    )


@kernel("grouped_matmul_fp8", claim=FP8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R1")
def grouped_matmul_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """One FP8 product per expert that owns rows."""
    a, n = activations_fp8(x, x_scale), weight.shape[1]
    out = torch.empty(x.shape[0], n, dtype=dtype)
    return _per_expert(
        offsets, out, lambda e, rows: product(a[rows], decoded_fp8(weight[e], weight_scale[e]), n, dtype)
    )


@kernel("grouped_matmul_int8", claim=INT8, refuse=narrow_output, priority=10, evidence="hardware", reproducibility="R2")
def grouped_matmul_int8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """One exact integer product per expert that owns rows: bitwise the reference's result."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=dtype)
    return _per_expert(
        offsets, out, lambda e, rows: integer_product(x[rows], weight[e]) * x_scale[rows] * weight_scale[e]
    )
