"""Compression of tokens into attention and index entries (spec §2.6, §5.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.operator import Cost, Judge, operator
from hal_ops.norm import rms_norm
from hal_ops.quant import fake_quant_fp4, fake_quant_fp8, hadamard
from hal_ops.rotary import frequencies, rope
from hal_ops.samples import Draw, grid

_SHAPES = [
    {"T": t, "r": r, "lanes": c, "w": w, "full": w > 128 and t > 1}
    for t in (0, 1, 9, 300)
    for r, c, w in ((4, 2, 512), (4, 2, 128), (128, 1, 512))
]


def _run(draw: Draw, T: int, r: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots, positions, offsets [T] of two sequences stepping together, and the tokens that close an entry."""
    first = T - T // 3
    starts = draw.ints("starts", 2, high=3 * r).tolist()
    offsets = torch.cat((torch.arange(first), torch.arange(T - first)))
    slots = torch.cat((torch.full((first,), 2), torch.zeros(T - first, dtype=torch.long)))
    positions = offsets + torch.where(slots == 2, starts[0], starts[1])
    return slots, positions, offsets, torch.nonzero((positions + 1) % r == 0)[:, 0]


def _inputs(draw: Draw, T: int, r: int, lanes: int, w: int) -> tuple[Any, ...]:
    width = lanes * w
    run = _run(draw, T, r)
    state = draw.f32("state", 3, lanes * r, 2 * width)
    return draw.f32("a", T, width), draw.f32("g", T, width), draw.f32("ape", r, width), state, *run, lanes, draw.dtype


def _gather(
    rows: Tensor, state: Tensor, slots: Tensor, positions: Tensor, offsets: Tensor, tokens: Tensor, span: int
) -> tuple[Tensor, Tensor]:
    """The ``span`` rows that end at each of ``tokens``, from this step where it holds them, else from the state."""
    back = torch.arange(span - 1, -1, -1, device=rows.device)
    now = back[None, :] <= offsets[tokens][:, None]
    here = rows[(tokens[:, None] - back[None, :]).clamp(min=0)]
    place = (positions[tokens][:, None] - back[None, :]) % state.shape[1]
    before = state[slots[tokens].long()[:, None], place]
    return torch.where(now[..., None], here, before), positions[tokens][:, None] - back[None, :] >= 0


def _store(rows: Tensor, state: Tensor, slots: Tensor, positions: Tensor, offsets: Tensor) -> None:
    """Write each sequence's newest rows into its ring; rows that a later token of the step overwrites are left out."""
    ring = state.shape[1]
    later = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
    if rows.shape[0] > ring:
        later[:-ring] = (slots[ring:] == slots[:-ring]) & (offsets[ring:] == offsets[:-ring] + ring)
    keep = torch.nonzero(~later)[:, 0]
    state[slots[keep].long(), positions[keep].long() % ring] = rows[keep].to(state.dtype)


@operator(
    "a[T,W]:f32, g[T,W]:f32, ape[r,W]:f32, state[S,L,2*W]:f32, slots[T]:int, positions[T]:int, offsets[T]:int,"
    "closing[C]:int -> pooled[C,W//lanes]:dtype",
    variable="T C S",
    writes="state",
    cost=lambda c: Cost(
        {"vector": 6.0 * c.axes["T"] * c.axes["W"]}, 4.0 * c.axes["W"] * (4.0 * c.axes["T"] + c.axes["C"] * c.axes["L"])
    ),
    judge=Judge("bound", "lanes*r"),
    samples=grid(_inputs, _SHAPES, families=("normal",)),
)
def compress(
    a: Tensor,
    g: Tensor,
    ape: Tensor,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    offsets: Tensor,
    closing: Tensor,
    lanes: int,
    dtype: torch.dtype,
) -> Tensor:
    """Pool windows of r tokens by a softmax per channel, and keep the raw rows that later windows need.

    With two lanes a window also pools the first-lane rows of the window before it; the window before the first does not
    exist (value 0, score −inf). Equal to taking the tokens one at a time, at any split into steps.

    Args:
        a, g: float32 [T, W] values and gate logits of this step's tokens, W = lanes · entry width.
        ape: float32 [r, W], added to the logits by position inside the window.
        state: float32 [slots, L, 2W], L >= lanes·r: raw rows (values, then logits with ape) of token t at t mod L.
        slots: [T] state slot of each token's sequence; tokens of a sequence are consecutive.
        positions: [T] absolute positions.
        offsets: [T] index of the token among its sequence's tokens in this step.
        closing: [C] token indices that close an entry, −1 for a padding row (its output is zero).
        lanes: 2 for overlapping windows (ratio 4), 1 otherwise.
        dtype: carrier of the result.

    Returns:
        carrier [C, W/lanes], before norm and rotation.

    Source: spec §2.6, §5.1, §5.3.
    """
    r, width = ape.shape[0], a.shape[1] // lanes
    rows = torch.cat((a, g + ape[positions % r]), dim=-1)
    tokens = closing.clamp(min=0).long()
    if rows.shape[0] == 0:
        return torch.zeros(closing.shape[0], width, dtype=dtype, device=a.device)
    window, exists = _gather(rows, state, slots, positions, offsets, tokens, lanes * r)
    value, score = window.chunk(2, dim=-1)
    if lanes == 2:
        value = torch.cat((value[:, :r, :width], value[:, r:, width:]), dim=1)
        score = torch.cat((score[:, :r, :width], score[:, r:, width:]), dim=1)
    weight = score.masked_fill(~exists[..., None], -torch.inf).softmax(dim=1)
    pooled = (weight * value.masked_fill(~exists[..., None], 0)).sum(dim=1)
    _store(rows, state, slots, positions, offsets)
    return pooled.masked_fill((closing < 0)[:, None], 0).to(dtype)


def _entry_inputs(draw: Draw, T: int, r: int, lanes: int, w: int) -> tuple[Any, ...]:
    norm = draw.f32("norm", w, scale=0.1, center=1.0)
    return *_inputs(draw, T, r, lanes, w), norm, frequencies(64, 160_000.0), 1e-6, "index" if w == 128 else "kv"


@operator(
    "a[T,W]:f32, g[T,W]:f32, ape[r,W]:f32, state[S,L,2*W]:f32, slots[T]:int, positions[T]:int, offsets[T]:int,"
    "closing[C]:int, norm[W//lanes]:f32, freqs[F]:f32 -> entries[C,W//lanes]:dtype",
    level="fused",
    variable="T C S",
    writes="state",
    composite=True,
    cost=lambda c: Cost(
        {"vector": 8.0 * c.axes["T"] * c.axes["W"]}, 4.0 * c.axes["W"] * (4.0 * c.axes["T"] + c.axes["C"] * c.axes["L"])
    ),
    judge=Judge("bound", "lanes*r"),
    samples=grid(_entry_inputs, _SHAPES, families=("normal",)),
)
def compress_entries(
    a: Tensor,
    g: Tensor,
    ape: Tensor,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    offsets: Tensor,
    closing: Tensor,
    lanes: int,
    dtype: torch.dtype,
    norm: Tensor,
    freqs: Tensor,
    eps: float,
    kind: str,
) -> Tensor:
    """Entries as their cache holds them: pooled, normed, rotated at the window's first token, then quantised by ``kind``.

    ``kind``: ``kv`` FP8 blocks of 64 on the dims that are not rotated; ``index`` Hadamard, then FP4 blocks of 32 on all;
    ``plain``: neither (the structural model). Other arguments as in :func:`compress`. Source: spec §2.6.
    """
    pooled = compress(a, g, ape, state, slots, positions, offsets, closing, lanes, dtype)
    first = (positions[closing.clamp(min=0)] - (ape.shape[0] - 1)).clamp(min=0) if positions.shape[0] else closing
    turned = rope(rms_norm(pooled, norm, eps)[:, None, :], first, freqs)[:, 0]
    return quantise_row(turned, 2 * freqs.shape[0], kind)


def quantise_row(row: Tensor, rotary: int, kind: str) -> Tensor:
    """Round rows [N, d] as their cache does: ``kv`` all but the last ``rotary`` dims, ``index`` all, ``plain`` none."""
    if kind == "kv":
        still = row.shape[-1] - rotary
        return torch.cat((fake_quant_fp8(row[..., :still], 64), row[..., still:]), dim=-1)
    if kind == "index":
        return fake_quant_fp4(hadamard(row), 32)
    return row
