"""Quantisation of activations and of state rows (spec §3.3, §3.4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.contract import Call
from hal.operator import Cost, Judge, operator
from hal_ops import formats
from hal_ops.samples import Draw, grid, token_grid

_FAMILIES = ("normal", "outliers", "rows", "adversarial")


def _count(call: Call, per_element: float) -> Cost:
    return Cost({"vector": per_element * torch.Size(call.tensors["x"].shape).numel()})


def _quant_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return draw.act("x", T, D), 128, torch.float8_e4m3fn


@operator(
    "x[T,K]:act -> codes[T,K]:dtype, scale[T,ceil(K,block)]:scale",
    cost=lambda c: _count(c, 3),
    judge=Judge("exact"),
    samples=grid(_quant_inputs, token_grid("D", odd={"D": 384}), families=_FAMILIES),
)
def quant_act_fp8(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise activations per token and block of K: codes and power-of-two scales.

    Args:
        x: carrier [T, K], K a multiple of ``block``.
        block: elements that share a scale.
        dtype: FP8 dialect of the codes (``float8_e4m3fn`` or ``float8_e4m3fnuz``).

    Returns:
        codes FP8 [T, K] and scale UE8M0 [T, K/block], bit-exact.

    Source: spec §3.3.
    """
    return formats.quantize_fp8(x, block, dtype)


def _quant_int8_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return (draw.act("x", T, D),)


@operator(
    "x[T,K]:act -> codes[T,K]:i8, scale[T,1]:f32",
    cost=lambda c: _count(c, 3),
    judge=Judge("exact"),
    samples=grid(_quant_int8_inputs, token_grid("D", odd={"D": 96}), families=_FAMILIES),
)
def quant_act_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations per token to symmetric INT8: codes int8 [T, K] and scale float32 [T, 1]."""
    return formats.quantize_int8(x)


def _fake_inputs(draw: Draw, T: int, D: int, block: int) -> tuple[Any, ...]:
    return draw.act("x", T, D), block


_STATE = [{"T": t, "D": 448, "block": 64, "full": t > 64} for t in (0, 1, 64, 512)] + [{"T": 3, "D": 128, "block": 128}]
_INDEX = [{"T": t, "D": 128, "block": 32, "full": t > 64} for t in (0, 1, 64, 4096)]


@operator(
    "x[N*,K]:act -> y[N*,K]:x",
    variable="N",
    cost=lambda c: _count(c, 4),
    judge=Judge("exact"),
    samples=grid(_fake_inputs, _STATE, families=_FAMILIES),
)
def fake_quant_fp8(x: Tensor, block: int) -> Tensor:
    """Round to E4M3 values times a power-of-two scale per block and return to the carrier: what a state row holds.

    Args:
        x: carrier [..., K], K a multiple of ``block``.

    Source: spec §3.4; the values attended to *are* these rounded ones, in prefill as in decode.
    """
    return formats.fake_quantize_fp8(x, block)


@operator(
    "x[N*,K]:act -> y[N*,K]:x",
    variable="N",
    cost=lambda c: _count(c, 4),
    judge=Judge("exact"),
    samples=grid(_fake_inputs, _INDEX, families=_FAMILIES),
)
def fake_quant_fp4(x: Tensor, block: int) -> Tensor:
    """Round to E2M1 values times a power-of-two scale per block and return to the carrier: index queries and keys.

    Args:
        x: carrier [..., K], K a multiple of ``block``.

    Source: spec §3.4.
    """
    return formats.fake_quantize_fp4(x, block)


def _hadamard_inputs(draw: Draw, T: int, n: int) -> tuple[Any, ...]:
    return (draw.act("x", T, n),)


@operator(
    "x[N*,n]:act -> y[N*,n]:x",
    variable="N",
    cost=lambda c: Cost({"vector": float(c.axes["N"] * c.axes["n"] * (c.axes["n"].bit_length() - 1))}),
    judge=Judge("bound", "n"),
    samples=grid(_hadamard_inputs, [{"T": t, "n": n} for t, n in ((0, 128), (1, 128), (64, 128), (5, 8), (3, 1))]),
)
def hadamard(x: Tensor) -> Tensor:
    """Multiply the last axis (a power of two) by the Sylvester-ordered Hadamard matrix times ``n^-1/2`` (spec §3.4)."""
    return formats.hadamard(x)
