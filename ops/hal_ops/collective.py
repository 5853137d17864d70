"""Collectives over ranks, on torch.distributed whatever library carries it (NCCL, RCCL, HCCL, Gloo)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from hal.operator import Cost, Judge, operator
from hal_ops.samples import Draw, grid


def _inputs(draw: Draw, T: int, D: int) -> tuple[Any, ...]:
    return draw.act("x", T, D), 1


_GRID = [{"T": t, "D": d} for t, d in ((0, 96), (1, 4096), (5, 96))]


@operator(
    "x[T,D]:act -> y[T,D]:x",
    cost=lambda c: Cost({"vector": float(c.axes["T"] * c.axes["D"])}),
    judge=Judge("bound", "world"),
    samples=grid(_inputs, _GRID),
)
def all_reduce(x: Tensor, world: int) -> Tensor:
    """Sum x carrier [T, D] over ``world`` ranks in float32, one rounding; one rank returns its own values.

    Source: spec §4.4 (float32 all-reduce, then cast).
    """
    if world == 1:
        return x.clone()
    # a copy even when nothing is cast: the collective works in place, and x belongs to the caller
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total.to(x.dtype)


@operator(
    "x[T,D]:act -> y[T,D*world]:x",
    judge=Judge("exact"),
    samples=grid(_inputs, _GRID),
)
def all_gather(x: Tensor, world: int) -> Tensor:
    """Concatenate x carrier [T, D] of ``world`` ranks along the last axis, in rank order -> [T, D·world]."""
    if world == 1:
        return x.clone()
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(world)]
    distributed.all_gather(parts, mine)
    return torch.cat(parts, dim=-1)
