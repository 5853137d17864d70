"""Manifold-constrained hyper-connections: mixing of the residual streams (spec §2.2, §2.9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.operator import Cost, Judge, operator
from hal_ops.norm import rms_norm
from hal_ops.numerics import up
from hal_ops.samples import Draw, grid, token_grid

STREAMS = 4
_GRID = token_grid("D", odd={"D": 96})


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """``(v·fnᵀ)·rsqrt(mean(v²) + eps)`` with v the flattened streams, in the accumulator dtype [T, M]."""
    v = up(streams.flatten(1))
    return (v @ fn.to(v.dtype).T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)


def _parameters(draw: Draw, D: int, rows: int, scales: int) -> tuple[Tensor, Tensor, Tensor]:
    fn = draw.f32("fn", rows, STREAMS * D, scale=(STREAMS * D) ** -0.5)
    return fn, draw.f32("scale", scales, scale=0.1, center=1.0), draw.f32("base", rows, scale=0.3)


def _mix_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return draw.act("streams", T, STREAMS, D), *_parameters(draw, D, STREAMS * (STREAMS + 2), 3), 1e-6, 1e-6, 20


@operator(
    "streams[T,S,D]:act, fn[S*(S+2),S*D]:f32, scale[3]:f32, base[S*(S+2)]:f32"
    " -> pre[T,S]:f32, post[T,S]:f32, comb[T,S,S]:f32",
    cost=lambda c: Cost({"fp32": c.axes["T"] * (200.0 * c.axes["D"] + 1300.0)}),
    judge=Judge("bound", "S*D"),
    samples=grid(_mix_inputs, _GRID),
)
def hc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing weights of one site: collapse weights ``pre``, write weights ``post``, doubly normalised ``comb``.

    Args:
        streams: carrier [T, S, D], flattened stream-major.
        fn, scale, base: float32 [S(S+2), S·D], [3], [S(S+2)].
        norm_eps: inside the reciprocal root.
        eps: added to ``pre``, after the row softmax, and to every denominator.
        iterations: Sinkhorn rounds; the first is softmax and columns, each other rows then columns.

    Returns:
        pre [T, S], post [T, S], comb [T, S, S], float32. The last step normalises columns.

    Source: spec §2.2 steps 1-4.
    """
    count = streams.shape[1]
    mixes, scale, base = _mixes(streams, fn, norm_eps), scale.to(up(streams).dtype), base.to(up(streams).dtype)
    pre = torch.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + eps
    post = 2 * torch.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = torch.unflatten(mixes[:, 2 * count :] * scale[2] + base[2 * count :], 1, (count, count))
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def _pre_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return draw.act("streams", T, STREAMS, D), torch.sigmoid(draw.f32("pre", T, STREAMS))


@operator(
    "streams[T,S,D]:act, pre[T,S]:f32 -> u[T,D]:streams",
    cost=lambda c: Cost({"vector": 8.0 * c.axes["T"] * c.axes["D"]}),
    judge=Judge("bound", "S"),
    samples=grid(_pre_inputs, _GRID),
)
def hc_pre(streams: Tensor, pre: Tensor) -> Tensor:
    """Collapse the streams: ``Σ_m pre_m · X[m]``, one rounding. streams [T, S, D], pre [T, S] -> [T, D] (spec §2.2.5)."""
    wide = up(streams)
    return (wide * pre.to(wide.dtype)[..., None]).sum(1).to(streams.dtype)


def _post_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    comb = draw.f32("comb", T, STREAMS, STREAMS).softmax(-1)
    return (
        draw.act("y", T, D),
        draw.act("streams", T, STREAMS, D),
        torch.sigmoid(draw.f32("post", T, STREAMS)) * 2,
        comb,
    )


@operator(
    "y[T,D]:act, streams[T,S,D]:act, post[T,S]:f32, comb[T,S,S]:f32 -> out[T,S,D]:streams",
    cost=lambda c: Cost({"vector": 40.0 * c.axes["T"] * c.axes["D"]}),
    judge=Judge("bound", "S+1"),
    samples=grid(_post_inputs, _GRID),
)
def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a site's output back: ``X'[n] = post[n]·y + Σ_m comb[m, n]·X[m]``, the sum over the first index of comb.

    Args:
        y: carrier [T, D].
        streams: carrier [T, S, D].
        post, comb: float32 [T, S], [T, S, S].

    Source: spec §2.2 (and pitfall V5: the transposed sum is the classic mistake).
    """
    wide = up(streams)
    mixed = torch.einsum("tmn,tmd->tnd", comb.to(wide.dtype), wide)
    return (post.to(wide.dtype)[..., None] * up(y)[:, None, :] + mixed).to(streams.dtype)


def _head_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return draw.act("streams", T, STREAMS, D), *_parameters(draw, D, STREAMS, 1), 1e-6, 1e-6


@operator(
    "streams[T,S,D]:act, fn[S,S*D]:f32, scale[1]:f32, base[S]:f32 -> u[T,D]:streams",
    cost=lambda c: Cost({"fp32": 48.0 * c.axes["T"] * c.axes["D"]}),
    judge=Judge("bound", "S*D"),
    samples=grid(_head_inputs, _GRID),
)
def hc_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float) -> Tensor:
    """Collapse the streams before the final norm, with weights of their own: [T, S, D] -> [T, D] (spec §2.9)."""
    mixes = _mixes(streams, fn, norm_eps)
    pre = torch.sigmoid(mixes * scale.to(mixes.dtype) + base.to(mixes.dtype)) + eps
    return (up(streams) * pre[..., None]).sum(1).to(streams.dtype)


def _enter_inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return *_mix_inputs(draw, T, D)[:4], draw.f32("norm", D, scale=0.1, center=1.0), 1e-6, 1e-6, 20


@operator(
    "streams[T,S,D]:act, fn[S*(S+2),S*D]:f32, scale[3]:f32, base[S*(S+2)]:f32, norm[D]:f32"
    " -> x[T,D]:streams, post[T,S]:f32, comb[T,S,S]:f32",
    level="fused",
    composite=True,
    cost=lambda c: Cost({"fp32": c.axes["T"] * (212.0 * c.axes["D"] + 1300.0)}),
    judge=Judge("bound", "S*D"),
    samples=grid(_enter_inputs, _GRID),
)
def hc_enter(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Open a site: mix, collapse and normalise. Returns the sub-layer's input [T, D] and post, comb for ``hc_post``."""
    pre, post, comb = hc_mix(streams, fn, scale, base, norm_eps, eps, iterations)
    return rms_norm(hc_pre(streams, pre), norm, norm_eps), post, comb
