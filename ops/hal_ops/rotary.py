"""Rotary position embedding on interleaved pairs (spec §2.4)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.operator import Cost, Judge, operator
from hal_ops.numerics import up
from hal_ops.samples import Draw, grid, token_grid


def frequencies(dims: int, theta: float) -> Tensor:
    """Angular frequencies ``θ^(−2i/dims)``, float32 [dims/2] (spec §2.4)."""
    return 1.0 / (theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))


def yarn_frequencies(
    dims: int, theta: float, *, factor: float, beta_fast: float, beta_slow: float, original_length: int
) -> Tensor:
    """YaRN-interpolated frequencies, float32 [dims/2]; no magnitude term exists (spec §2.4).

    Args:
        dims: rotary dimensions.
        theta: base.
        factor: how far the context is stretched.
        beta_fast: rotations over ``original_length`` above which a frequency is kept.
        beta_slow: rotations below which a frequency is divided by ``factor``.
        original_length: context length of the base model, in tokens.
    """

    def corrected(rotations: float) -> float:
        return dims * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(corrected(beta_fast)), 0)
    high = float(min(math.ceil(corrected(beta_slow)), dims - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = frequencies(dims, theta)
    return base / factor * ramp + base * (1 - ramp)


def _inputs(draw: Draw, T: int, H: int, d: int) -> tuple[Any, ...]:
    positions = draw.ints("positions", T, high=1_048_576)
    return draw.act("x", T, H, d), positions, frequencies(min(64, d), 10_000.0), False


@operator(
    "x[T,H,d]:act, positions[T]:int, freqs[F]:f32 -> y[T,H,d]:x",
    cost=lambda c: Cost({"vector": 6.0 * c.axes["T"] * c.axes["H"] * c.axes["F"]}),
    judge=Judge("bound", "2"),
    samples=grid(_inputs, [*token_grid("H", "d", odd={"H": 3, "d": 96}), {"T": 7, "H": 1, "d": 512}]),
)
def rope(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2F dims of every head by its token's position; the other dims pass through.

    Pairs are interleaved, (2i, 2i+1). The angle is the float32 product of position and frequency, rounded once: at
    positions near 10^6 that rounding is visible and part of the reference.

    Args:
        x: carrier [T, H, d].
        positions: integer [T], absolute.
        freqs: float32 [F], 2F <= d.
        inverse: rotate back (sine negated), as the attention output needs.

    Source: spec §2.4; inverse, §2.5 step 8.
    """
    still, turning = x[..., : x.shape[-1] - 2 * freqs.shape[0]], x[..., x.shape[-1] - 2 * freqs.shape[0] :]
    angle = (positions.to(torch.float32)[:, None] * freqs.to(torch.float32))[:, None, :]
    pairs = torch.unflatten(up(turning), -1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = angle.to(a.dtype).cos(), angle.to(a.dtype).sin()
    if inverse:
        sin = -sin
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still, turned.to(x.dtype)), dim=-1)
