"""A weight with its stored format, and the one place where a format picks its linear operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hal.errors import InputError
from hal_ops.linear import BLOCK, linear_dense, linear_fp4, linear_fp8, linear_int8
from hal_ops.quant import fake_quant_fp8

WeightFormat = Literal["fp8", "fp4", "int8", "dense"]


@dataclass(frozen=True)
class Weight:
    """A (stack of) linear weight(s) [..., N, K] as stored.

    ``fp8``: E4M3 codes, scale per 128x128; ``fp4``: packed E2M1, scale per row and 32 of K; ``int8``: scale per row;
    ``dense``: the carrier's values, no scale. ``quantised_act`` says that the operator's activations are quantised
    to FP8 blocks even though the weight was decoded: the trained graph has that rounding in it.
    """

    data: Tensor
    scale: Tensor | None = None
    format: WeightFormat = "dense"
    quantised_act: bool = False

    @property
    def rows(self) -> int:
        """Output features N."""
        return self.data.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        scale = 0 if self.scale is None else self.scale.nbytes
        return self.data.nbytes + scale


def scale_of(w: Weight) -> Tensor:
    """The scale of a quantised weight.

    Raises:
        InputError: the weight has none.
    """
    if w.scale is None:
        raise InputError(f"weight of format {w.format} has no scale; right is a scale tensor beside the codes")
    return w.scale


def linear(x: Tensor, w: Weight) -> Tensor:
    """x carrier [T, K] times ``w`` in its own format -> carrier [T, N]."""
    if w.format == "fp8":
        return linear_fp8(x, w.data, scale_of(w))
    if w.format == "fp4":
        return linear_fp4(x, w.data, scale_of(w))
    if w.format == "int8":
        return linear_int8(x, w.data, scale_of(w))
    return linear_dense(fake_quant_fp8(x, BLOCK) if w.quantised_act else x, w.data)
