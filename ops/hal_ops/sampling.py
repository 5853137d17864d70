"""Choosing the next token: penalties and counter-based sampling (spec §6.5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.operator import Cost, Judge, operator
from hal_ops.samples import Draw, grid

_MIX1, _MIX2 = -4658895280553007687, -7723592293110705685  # SplitMix64's odd multipliers as signed 64-bit
_GOLDEN = -7046029254386353131


def _splitmix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, wrapping; the shifts are logical."""

    def shifted(v: Tensor, n: int) -> Tensor:
        return (v >> n) & ((1 << (64 - n)) - 1)

    x = (x ^ shifted(x, 30)) * _MIX1
    x = (x ^ shifted(x, 27)) * _MIX2
    return x ^ shifted(x, 31)


def _exponential(bits: Tensor) -> Tensor:
    """``-log(1 - u)`` in float32 of u = (bits + ½)·2^-40, bits int64 in [0, 2^40): positive and finite."""
    u = (2 * bits + 1).to(torch.float32) * 2.0**-41
    return -torch.log1p(-u.clamp(max=1 - 2.0**-24))


def exponential_noise(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """Exp(1) noise float32 [B, count] that depends on (seed, step, index) alone, never on the batch (fault B57).

    float32 keeps the digits of small values, where a race over a large vocabulary is won, so that ties are rare; it is
    never 0, which would let an impossible token win as 0/0.
    """
    key = _splitmix(_splitmix(seeds) + steps * _GOLDEN)
    index = torch.arange(1, count + 1, device=seeds.device, dtype=torch.int64) * _GOLDEN
    return _exponential((_splitmix(key[:, None] + index[None, :]) >> 24) & 0xFFFFFFFFFF)


def _inputs(draw: Draw, B: int, V: int) -> tuple[Any, ...]:
    ones = torch.ones(B)
    seeds = draw.ints("seeds", B, high=2**31)
    return (
        draw.f32("logits", B, V, scale=3.0),
        ones * 0.8,
        torch.full((B,), 40),
        ones * 0.9,
        ones * 0.02,
        seeds,
        seeds * 0,
    )


_GRID = [{"B": b, "V": v, "full": v * b > 2**18} for b, v in ((0, 512), (1, 512), (5, 512), (1, 129280), (16, 129280))]


@operator(
    "logits[B,V]:f32, temperature[B]:f32, top_k[B]:i64, top_p[B]:f32, min_p[B]:f32, seeds[B]:i64, steps[B]:i64"
    " -> ids[B]:i64",
    variable="B",
    cost=lambda c: Cost({"vector": 12.0 * c.axes["B"] * c.axes["V"]}),
    judge=Judge("distribution"),
    samples=grid(_inputs, _GRID, families=("normal",)),
)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """Draw one token per row: temperature, then top-k, then top-p on what is left, then min-p; exponential race.

    Args:
        logits: float32 [B, V].
        temperature: [B]; 0 takes the argmax (ties to the lower id).
        top_k: int64 [B]; 0 keeps all.
        top_p: [B] in (0, 1]: the smallest set whose probability reaches it, the crossing token included.
        min_p: [B] in [0, 1): drops tokens below ``min_p`` times the largest probability.
        seeds, steps: int64 [B]; together they fix the noise.

    Returns:
        int64 [B].

    Source: spec §6.5 (softmax over temperature divided by Exp(1) noise, argmax); fault B58.
    """
    if logits.shape[0] == 0:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    probs = (logits / temperature.clamp(min=1e-5)[:, None]).softmax(-1)
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)[None, :]
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    kept = ordered * keep
    before = kept.cumsum(-1) - kept
    keep &= (before < top_p[:, None] * kept.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    noise = exponential_noise(seeds, steps, probs.shape[1]).gather(1, index)
    race = (ordered / noise).masked_fill(~keep, -1.0)
    drawn = index.gather(1, race.argmax(-1, keepdim=True))[:, 0]
    return torch.where(temperature > 0, drawn, logits.argmax(-1))


def _penalty_inputs(draw: Draw, B: int, V: int) -> tuple[Any, ...]:
    counts = draw.ints("counts", B, V, high=3).to(torch.int32)
    ones = torch.ones(B)
    return draw.f32("logits", B, V, scale=3.0), counts, counts > 1, ones * 1.3, ones * 0.5, ones * 0.25


@operator(
    "logits[B,V]:f32, counts[B,V]:i32, seen[B,V]:bool, repetition[B]:f32, presence[B]:f32, frequency[B]:f32"
    " -> out[B,V]:f32",
    variable="B",
    cost=lambda c: Cost({"vector": 6.0 * c.axes["B"] * c.axes["V"]}),
    judge=Judge("bound", "1"),
    samples=grid(_penalty_inputs, _GRID[:3], families=("normal",)),
)
def penalize(
    logits: Tensor, counts: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalise tokens that occurred: repetition divides (or multiplies negative) logits, the others subtract.

    Args:
        logits: float32 [B, V].
        counts: int32 [B, V] occurrences in the generated text; ``seen`` bool [B, V] occurrence in the prompt.
        repetition: [B], 1 for none; applies to prompt and generated tokens.
        presence, frequency: [B], 0 for none; apply to generated tokens once and per occurrence.
    """
    known = seen | (counts > 0)
    factor = repetition[:, None]
    scaled = torch.where(known, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return scaled - presence[:, None] * (counts > 0) - frequency[:, None] * counts
