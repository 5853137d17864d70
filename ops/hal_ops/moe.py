"""Mixture of experts: routing, grouped linears, clamped SwiGLU, combination (spec §2.8)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hal.contract import Call
from hal.errors import InputError
from hal.operator import Cost, Judge, operator
from hal_ops import formats
from hal_ops.linear import BLOCK, fp4_weight, fp8_weight
from hal_ops.numerics import accumulator, up
from hal_ops.quant import fake_quant_fp8, quant_act_fp8, quant_act_int8
from hal_ops.samples import Draw, grid
from hal_ops.weight import Weight, linear, scale_of

_ROUTES = [{"T": t, "E": e, "K": 6, "full": t > 64} for t in (0, 1, 64, 512) for e in (256, 384)] + [
    {"T": 5, "E": 8, "K": 2}
]


def _scores(logits: Tensor) -> Tensor:
    """``sqrt(softplus(z))``, softplus linear above 20 (spec §2.8)."""
    return F.softplus(up(logits), threshold=20.0).sqrt()


def _routed(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * scale


def _gate_inputs(draw: Draw, T: int, E: int, K: int) -> tuple[Any, ...]:
    return draw.f32("logits", T, E, scale=3.0), draw.f32("bias", E, scale=0.2), K, 1.5


@operator(
    "logits[T,E]:f32, bias[E]:f32 -> ids[T,k]:i64, weights[T,k]:f32",
    cost=lambda c: Cost({"vector": 8.0 * c.axes["T"] * c.axes["E"]}),
    judge=Judge("topk", "k"),
    samples=grid(_gate_inputs, _ROUTES, families=("normal",)),
)
def gate_topk(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose k experts by biased score; weigh them by their unbiased scores, normalised, times ``scale``.

    Args:
        logits: float32 [T, E].
        bias: float32 [E]; it selects and does not weigh.

    Returns:
        ids int64 [T, k] by falling score, ties to the lower id; weights float32 [T, k].

    Source: spec §2.8.
    """
    scores = _scores(logits)
    ids = (scores + bias.to(scores.dtype)).sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    return ids, _routed(scores, ids, scale)


def _hash_inputs(draw: Draw, T: int, E: int, K: int) -> tuple[Any, ...]:
    table = torch.stack([draw.ints(f"table{i}", 512, low=i * E // K, high=(i + 1) * E // K) for i in range(K)], -1)
    return draw.f32("logits", T, E, scale=3.0), draw.ints("tokens", T, high=512), table, 1.5


@operator(
    "logits[T,E]:f32, tokens[T]:int, table[V,K]:int -> ids[T,K]:i64, weights[T,K]:f32",
    cost=lambda c: Cost({"vector": 8.0 * c.axes["T"] * c.axes["K"]}),
    judge=Judge("bound", "K"),
    samples=grid(_hash_inputs, _ROUTES, families=("normal",)),
)
def gate_hash(logits: Tensor, tokens: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Take the experts from a table by token id; weigh them by their scores, normalised, times ``scale`` (spec §2.8).

    Args:
        logits: float32 [T, E].
        tokens: integer [T] in [0, V).
        table: integer [V, K], the checkpoint's ``tid2eid``.
    """
    ids = table[tokens].long()
    return ids, _routed(_scores(logits), ids, scale)


def _swiglu_inputs(draw: Draw, T: int, I: int) -> tuple[Any, ...]:  # noqa: E741
    return draw.act("gate_up", T, 2 * I) * 8, 10.0, draw.f32("weights", T, scale=0.1, center=0.5)


@operator(
    "gate_up[T,J]:act, weights[T]:f32? -> a[T,J//2]:gate_up",
    cost=lambda c: Cost({"vector": 6.0 * c.axes["T"] * c.axes["J"]}),
    judge=Judge("bound", "1"),
    samples=grid(
        _swiglu_inputs, [{"T": t, "I": i, "full": t > 64} for t in (0, 1, 64, 3072) for i in (2048, 3072, 48)]
    ),
)
def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """Clamped SwiGLU: ``silu(min(g, limit)) · clamp(u, ±limit)``, times a routing weight, one rounding.

    Args:
        gate_up: carrier [T, 2I], gate columns first.
        limit: clamp; 0 means none. The gate is clamped from above only.
        weights: float32 [T] or None, applied before the second linear and so before its quantisation.

    Source: spec §2.8 (faults B09, B10: routed and shared experts alike).
    """
    gate, value = up(gate_up).chunk(2, dim=-1)
    if limit:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    out = F.silu(gate) * value
    if weights is not None:
        out = out * weights.to(out.dtype)[:, None]
    return out.to(gate_up.dtype)


def _sort_inputs(draw: Draw, T: int, E: int, K: int) -> tuple[Any, ...]:
    return draw.ints("ids", T, K, high=E), E


@operator(
    "ids[T,K]:i64 -> order[T*K]:i64, offsets[experts+1]:i64",
    cost=lambda c: Cost({"vector": 16.0 * c.axes["T"] * c.axes["K"]}),
    judge=Judge("exact"),
    samples=grid(_sort_inputs, _ROUTES, families=("normal",)),
)
def moe_sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Group (token, choice) pairs by expert, tokens ascending inside an expert.

    Returns:
        order int64 [T·K]: flat pair ``t·K + k`` of each sorted row; offsets int64 [experts + 1]: rows of expert e are
        ``offsets[e]:offsets[e+1]``.
    """
    flat = ids.flatten()
    order = flat.sort(stable=True).indices
    edges = torch.arange(experts + 1, device=ids.device, dtype=flat.dtype)
    return order, torch.searchsorted(flat[order], edges)


def _split(draw: Draw, R: int, E: int) -> Tensor:
    """Offsets [E + 1] of a skewed split of R rows over E experts, some empty."""
    owner = draw.ints("owner", R, high=max(1, E // 2)) * 2
    return torch.searchsorted(owner.sort().values, torch.arange(E + 1))


_GROUPS = [
    {"R": r, "E": e, "N": n, "K": k, "full": e * n * k > 2**22}
    for r, e, n, k in ((0, 4, 64, 128), (1, 4, 64, 128), (37, 8, 64, 256), (6, 8, 4096, 4096), (384, 8, 4096, 2048))
]


def _per_expert(x: Tensor, offsets: Tensor, weight_of: Any, dtype: torch.dtype, rows: int) -> Tensor:
    """Multiply each expert's rows by its own decoded weight; decodes only experts that own rows."""
    out = torch.empty(x.shape[0], rows, dtype=dtype, device=x.device)
    edges = offsets.tolist()
    for e, (start, end) in enumerate(itertools.pairwise(edges)):
        if end > start:
            out[start:end] = (x[start:end] @ weight_of(e).to(x.dtype).T).to(dtype)
    return out


def _grouped_cost(unit: str) -> Any:
    def cost(c: Call) -> Cost:
        weight = c.tensors["weight"]
        stored = 1 if unit == "fp8" and weight.dtype == torch.int8 else weight.dtype.itemsize
        touched = min(c.axes["E"], c.axes["R"]) * c.axes["N"] * weight.shape[-1] * stored
        moved = touched + c.axes["R"] * (c.axes["K"] + 2.0 * c.axes["N"])
        return Cost({unit: 2.0 * c.axes["R"] * c.axes["N"] * c.axes["K"]}, moved)

    return cost


def _grouped_fp4_inputs(draw: Draw, R: int, E: int, N: int, K: int) -> tuple[Any, ...]:
    codes, scale = formats.quantize_fp8(draw.act("x", R, K), BLOCK, torch.float8_e4m3fn)
    return codes, scale, *fp4_weight(draw, "weight", E, N, K), _split(draw, R, E), draw.dtype


@operator(
    "x[R,K]:fp8, x_scale[R,ceil(K,128)]:scale, weight[E,N,K//2]:fp4, weight_scale[E,N,ceil(K,32)]:scale,"
    "offsets[E+1]:i64 -> y[R,N]:dtype",
    variable="R",
    cost=_grouped_cost("fp8"),
    judge=Judge("bound", "K"),
    samples=grid(_grouped_fp4_inputs, _GROUPS),
)
def grouped_matmul_fp4(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """FP8 rows sorted by expert times each expert's FP4 weight; experts without rows are not read (spec §3.3)."""
    a = formats.dequantize_fp8(x, x_scale, BLOCK).to(accumulator(dtype))
    return _per_expert(
        a, offsets, lambda e: formats.dequantize_weight_fp4(weight[e], weight_scale[e]), dtype, weight.shape[1]
    )


def _grouped_fp8_inputs(draw: Draw, R: int, E: int, N: int, K: int) -> tuple[Any, ...]:
    codes, scale = formats.quantize_fp8(draw.act("x", R, K), BLOCK, torch.float8_e4m3fn)
    return codes, scale, *fp8_weight(draw, "weight", E, N, K), _split(draw, R, E), draw.dtype


@operator(
    "x[R,K]:fp8, x_scale[R,ceil(K,128)]:scale, weight[E,N,K]:fp8, weight_scale[E,ceil(N,128),ceil(K,128)]:scale,"
    "offsets[E+1]:i64 -> y[R,N]:dtype",
    variable="R",
    cost=_grouped_cost("fp8"),
    judge=Judge("bound", "K"),
    samples=grid(_grouped_fp8_inputs, _GROUPS),
)
def grouped_matmul_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """FP8 rows sorted by expert times each expert's FP8 weight (the Base checkpoints)."""
    a = formats.dequantize_fp8(x, x_scale, BLOCK).to(accumulator(dtype))
    return _per_expert(
        a, offsets, lambda e: formats.dequantize_weight_fp8(weight[e], weight_scale[e]), dtype, weight.shape[1]
    )


def _grouped_int8_inputs(draw: Draw, R: int, E: int, N: int, K: int) -> tuple[Any, ...]:
    weight, scale = formats.quantize_int8(draw.f32("weight", E, N, K) * K**-0.5)
    return (
        *formats.quantize_int8(draw.act("x", R, K)),
        weight,
        scale[..., 0].contiguous(),
        _split(draw, R, E),
        draw.dtype,
    )


@operator(
    "x[R,K]:i8, x_scale[R,1]:f32, weight[E,N,K]:i8, weight_scale[E,N]:f32, offsets[E+1]:i64 -> y[R,N]:dtype",
    variable="R",
    cost=_grouped_cost("int8"),
    judge=Judge("bound", "1"),
    samples=grid(_grouped_int8_inputs, _GROUPS),
)
def grouped_matmul_int8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """INT8 rows sorted by expert times each expert's INT8 weight, scales per row and output channel."""
    total = _per_expert(x.double(), offsets, lambda e: weight[e], torch.float64, weight.shape[1])
    edges = torch.diff(offsets)
    channel = weight_scale.repeat_interleave(edges, dim=0, output_size=x.shape[0])
    acc = accumulator(dtype)
    return (total.to(acc) * x_scale.to(acc) * channel.to(acc)).to(dtype)


def _grouped_dense_inputs(draw: Draw, R: int, E: int, N: int, K: int) -> tuple[Any, ...]:
    return draw.act("x", R, K), draw.weight("weight", E, N, K), _split(draw, R, E)


@operator(
    "x[R,K]:act, weight[E,N,K]:act, offsets[E+1]:i64 -> y[R,N]:x",
    variable="R",
    cost=_grouped_cost("bf16"),
    judge=Judge("bound", "K"),
    samples=grid(_grouped_dense_inputs, _GROUPS),
)
def grouped_matmul_dense(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Carrier rows sorted by expert times each expert's dense weight, float32 accumulation, one rounding."""
    return _per_expert(up(x), offsets, lambda e: weight[e], x.dtype, weight.shape[1])


def grouped(x: Tensor, w: Weight, offsets: Tensor) -> Tensor:
    """Rows x carrier [R, K] sorted by expert times ``w`` [E, N, K] in its own format -> carrier [R, N]."""
    if w.format == "fp4":
        return grouped_matmul_fp4(*quant_act_fp8(x, BLOCK, torch.float8_e4m3fn), w.data, scale_of(w), offsets, x.dtype)
    if w.format == "fp8":
        return grouped_matmul_fp8(*quant_act_fp8(x, BLOCK, w.data.dtype), w.data, scale_of(w), offsets, x.dtype)
    if w.format == "int8":
        return grouped_matmul_int8(*quant_act_int8(x), w.data, scale_of(w), offsets, x.dtype)
    return grouped_matmul_dense(fake_quant_fp8(x, BLOCK) if w.quantised_act else x, w.data, offsets)


def _combine_inputs(draw: Draw, T: int, E: int, K: int) -> tuple[Any, ...]:
    order = moe_sort.fn(draw.ints("ids", T, K, high=E), E)[0]
    return draw.act("rows", T * K, 96), order, T


@operator(
    "rows[R,D]:act, order[R]:i64 -> y[tokens,D]:f32",
    variable="R",
    cost=lambda c: Cost({"vector": float(c.axes["R"] * c.axes["D"])}),
    judge=Judge("bound", "R//max(tokens,1)"),
    samples=grid(_combine_inputs, _ROUTES, families=("normal",)),
)
def moe_combine(rows: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Sum each token's expert rows in float32, in ascending expert order: rows [R, D] -> float32 [tokens, D]."""
    if tokens == 0:
        return torch.zeros(0, rows.shape[1], dtype=accumulator(rows.dtype), device=rows.device)
    choices = rows.shape[0] // tokens
    # sorted rows of a token appear in expert order, so a stable sort by token keeps that order
    mine = (order // choices).sort(stable=True).indices.view(tokens, choices)
    total = up(rows[mine[:, 0]])
    for k in range(1, choices):
        total = total + up(rows[mine[:, k]])
    return total


def _experts_inputs(draw: Draw, T: int, D: int, I: int, E: int, K: int) -> tuple[Any, ...]:  # noqa: E741
    x, logits = draw.act("x", T, D), draw.f32("logits", T, E, scale=3.0)
    ids, weights = gate_topk.fn(logits, draw.f32("bias", E, scale=0.2), K, 1.5)
    w13 = Weight(*fp4_weight(draw, "w13", E, 2 * I, D), "fp4", True)
    return x, ids, weights, w13, Weight(*fp4_weight(draw, "w2", E, D, I), "fp4", True), 10.0


def _experts_cost(c: Call) -> Cost:
    w13, w2 = c.tensors["w13.data"], c.tensors["w2.data"]
    experts, inner, dim = w13.shape[0], w13.shape[1] // 2, c.axes["D"]
    pairs = c.axes["T"] * c.axes["K"]
    distinct = experts * (1 - (1 - c.axes["K"] / experts) ** c.axes["T"])
    stored = sum(m.nbytes for n, m in c.tensors.items() if n.startswith(("w13.", "w2."))) / experts
    flops = 6.0 * pairs * dim * inner
    return Cost({"fp8" if w2.dtype.itemsize == 1 else "bf16": flops}, distinct * stored + 6.0 * c.axes["T"] * dim)


@operator(
    "x[T,D]:act, ids[T,K]:i64, weights[T,K]:f32 -> y[T,D]:f32",
    level="block",
    composite=True,
    cost=_experts_cost,
    judge=Judge("bound", "D"),
    samples=grid(
        _experts_inputs,
        [{"T": t, "D": 256, "I": 128, "E": 8, "K": 2} for t in (0, 1, 5, 64)]
        + [{"T": t, "D": 4096, "I": 2048, "E": 16, "K": 6, "full": True} for t in (1, 64)],
    ),
)
def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """Routed experts: gather, first linear, weighted SwiGLU, second linear, sum per token in expert order.

    Args:
        x: carrier [T, D].
        ids, weights: int64 and float32 [T, K].
        w13: experts' gate and up projections [E, 2I, D], gate rows first.
        w2: down projections [E, D, I].
        limit: SwiGLU clamp, 0 for none.

    Returns:
        float32 [T, D].

    Source: spec §2.8; the routing weight is applied before ``w2``.
    """
    order, offsets = moe_sort(ids, w13.data.shape[0])
    rows = grouped(x[order // ids.shape[1]], w13, offsets)
    return moe_combine(grouped(swiglu(rows, limit, weights.flatten()[order]), w2, offsets), order, x.shape[0])


def _shared_inputs(draw: Draw, T: int, D: int, I: int) -> tuple[Any, ...]:  # noqa: E741
    w13 = Weight(*fp8_weight(draw, "w13", 2 * I, D), "fp8", True)
    return draw.act("x", T, D), w13, Weight(*fp8_weight(draw, "w2", D, I), "fp8", True), 10.0


def _shared_cost(c: Call) -> Cost:
    return Cost({"fp8": 6.0 * c.axes["T"] * c.axes["D"] * c.tensors["w13.data"].shape[0] / 2})


@operator(
    "x[T,D]:act -> y[T,D]:x",
    level="block",
    composite=True,
    cost=_shared_cost,
    judge=Judge("bound", "D"),
    samples=grid(
        _shared_inputs,
        [{"T": t, "D": 256, "I": 128} for t in (0, 1, 5)] + [{"T": 1, "D": 4096, "I": 2048, "full": True}],
    ),
)
def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """The expert that every token passes: x carrier [T, D] -> carrier [T, D], same clamp, no weight (spec §2.8)."""
    return linear(swiglu(linear(x, w13), limit), w2)


def check_token_ids(tokens: Tensor, vocab: int) -> None:
    """Refuse ids outside the vocabulary before they index a table.

    Raises:
        InputError: names the first bad id and the valid range (fault B74).
    """
    bad = tokens[(tokens < 0) | (tokens >= vocab)]
    if bad.numel():
        raise InputError(f"token id {int(bad[0])} is outside the vocabulary, right is 0 to {vocab - 1}")
