"""The two dtypes of every reference: the carrier (what tensors hold) and the accumulator (what arithmetic uses).

The released model carries bfloat16 and accumulates in float32. A float32 carrier makes every rounding to the carrier the
identity (the structural model); a float64 carrier makes the reference the mathematical operator on the same operands.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float64 for a float64 carrier, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def up(x: Tensor) -> Tensor:
    """``x`` in the accumulator dtype of its carrier."""
    return x.to(accumulator(x.dtype))
