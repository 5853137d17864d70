"""Kernels for CPUs that multiply bfloat16 matrices natively (AVX512-BF16, AMX); elsewhere the claim refuses by architecture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hal.kernel import Claim, Range, kernel
from hal_cpu.features import at_least

#: T = 1 reads the weight once whatever the instruction set: the portable kernel serves it
_BF16 = Claim(
    dtypes={"x": (torch.bfloat16,), "weight": (torch.bfloat16,)},
    axes={"T": Range(min=2)},
    arch=at_least("x86-64-avx512-bf16"),
)


@kernel("linear_dense", claim=_BF16, priority=20, evidence="hardware", reproducibility="R1")
def linear_dense(x: Tensor, weight: Tensor) -> Tensor:
    """oneDNN's bfloat16 product: float32 accumulation in tiles, one rounding."""
    return F.linear(x, weight)


NATIVE = (linear_dense,)
