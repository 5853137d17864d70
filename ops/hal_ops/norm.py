"""Normalisation (spec §2.3 and §2.5 step 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.contract import Call
from hal.operator import Cost, Judge, operator
from hal_ops.numerics import up
from hal_ops.samples import Draw, grid, token_grid


def _rms_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return draw.act("x", T, D), draw.f32("weight", D, scale=0.1, center=1.0), 1e-6


def _elements(call: Call) -> float:
    first = next(iter(call.tensors.values()))
    return float(torch.Size(first.shape).numel())


@operator(
    "x[N*,D]:act, weight[D]:f32 -> y[N*,D]:x",
    variable="N",
    cost=lambda c: Cost({"vector": 4 * _elements(c)}),
    judge=Judge("bound", "D"),
    samples=grid(
        _rms_inputs,
        [*token_grid("D", odd={"D": 96}), {"T": 1, "D": 1024}, {"T": 3, "D": 512}],
        families=("normal", "positive", "outliers", "rows"),
    ),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis: ``w · x · rsqrt(mean(x²) + eps)``.

    Args:
        x: carrier [..., D].
        weight: float32 [D], multiplied before the only rounding.
        eps: added to the mean square.

    Returns:
        carrier [..., D].

    Source: spec §2.3.
    """
    v = up(x)
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight.to(v.dtype)).to(x.dtype)


def _head_inputs(draw: Draw, T: int, H: int, d: int) -> tuple[Any, ...]:
    return draw.act("x", T, H, d), 1e-6


@operator(
    "x[T,H,d]:act -> y[T,H,d]:x",
    cost=lambda c: Cost({"vector": 4 * _elements(c)}),
    judge=Judge("bound", "d"),
    samples=grid(_head_inputs, token_grid("H", "d", odd={"H": 3, "d": 64}), families=("normal", "outliers", "rows")),
)
def head_rms_norm(x: Tensor, eps: float) -> Tensor:
    """Unweighted per-head normalisation of queries, rounded to the carrier wherever the reference rounds.

    The square, the mean, the mean plus eps, the reciprocal root and the product are each rounded to the carrier; each is
    computed, and the mean accumulated, in float32.

    Args:
        x: carrier [T, H, d].
        eps: added to the mean square.

    Source: spec §2.5 step 2.
    """
    mean = up(x.square()).mean(-1, keepdim=True).to(x.dtype)
    # cast by hand: in the carrier, devices differ in whether eps and the square root inside rsqrt are rounded as well
    total = (up(mean) + eps).to(x.dtype)
    return x * torch.rsqrt(up(total)).to(x.dtype)
