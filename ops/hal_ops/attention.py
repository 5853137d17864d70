"""Paged rows, lightning indexer and sparse attention with sinks (spec §2.5, §2.7, §5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.contract import Call
from hal.operator import Cost, Judge, operator
from hal_ops import generator
from hal_ops.compress import quantise_row
from hal_ops.norm import head_rms_norm, rms_norm
from hal_ops.numerics import accumulator, up
from hal_ops.rotary import frequencies, rope
from hal_ops.samples import Draw, grid

#: largest number of gathered elements that a reference holds at once
_GATHER_LIMIT = 1 << 24


def _write_inputs(draw: Draw, T: int, d: int) -> tuple[Any, ...]:
    rows = torch.from_numpy(_spread(draw, T, 2 * T + 3))
    if T > 2:
        rows[1] = -1
    return draw.act("pool", 2 * T + 3, d), rows, draw.act("values", T, d)


def _spread(draw: Draw, count: int, size: int) -> Any:
    """``count`` distinct row numbers below ``size``, int32."""
    return generator.permutation(f"{draw.key}/rows", size)[:count].to(torch.int32).numpy().copy()


@operator(
    "pool[R,d]:act, rows[T]:int, values[T,d]:act ->",
    variable="T R",
    writes="pool",
    cost=lambda c: Cost(bytes=2.0 * c.axes["T"] * c.axes["d"] * c.tensors["values"].dtype.itemsize),
    judge=Judge("exact"),
    samples=grid(
        _write_inputs, [{"T": t, "d": d} for t, d in ((0, 512), (1, 512), (64, 512), (5, 128))], families=("normal",)
    ),
)
def write_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write ``values`` [T, d] to rows of ``pool`` [R, d]; a row of −1 is skipped; rows are distinct."""
    keep = rows >= 0
    pool[rows[keep].long()] = values[keep].to(pool.dtype)


def _page_inputs(draw: Draw, T: int, M: int) -> tuple[Any, ...]:
    entries = draw.ints("entries", T, M, low=-1, high=64).to(torch.int32)
    return entries, draw.ints("slots", T, high=3), draw.ints("pages", 3, 8, high=100).to(torch.int32), 8


@operator(
    "entries[T,M]:i32, slots[T]:int, pages[S,P]:i32 -> rows[T,M]:i32",
    variable="T M S P",
    judge=Judge("exact"),
    samples=grid(
        _page_inputs, [{"T": t, "M": m} for t, m in ((0, 4), (1, 512), (7, 0), (5, 33))], families=("normal",)
    ),
)
def page_rows(entries: Tensor, slots: Tensor, pages: Tensor, page: int) -> Tensor:
    """Cache rows of entry numbers: entry j of slot s is row ``pages[s, j // page]·page + j mod page``; −1 stays −1.

    Args:
        entries: int32 [T, M].
        slots: [T] slot of each token's sequence.
        pages: int32 [S, P] page table.
        page: rows per page.
    """
    j = entries.clamp(min=0).long()
    held = pages[slots.long()[:, None], j // page].long() * page + j % page
    return torch.where(entries >= 0, held, -1).to(torch.int32)


def _index_inputs(draw: Draw, T: int, H: int, d: int, n: int, k: int) -> tuple[Any, ...]:
    page, pages = 16, -(-n // 16)
    table = torch.arange(2 * pages, dtype=torch.int32).view(2, pages).flip(1)
    visible = draw.ints("visible", T, high=n + 1)
    q, w = draw.act("q", T, H, d), draw.act("weights", T, H) * d**-0.5 * H**-0.5
    return q, w, draw.act("keys", 2 * pages * page, d), table, draw.ints("slots", T, high=2), visible, k, page


_INDEX = [
    {"T": t, "H": 64, "d": 128, "n": n, "k": 512, "full": t * n > 2**13} for t in (1, 64) for n in (96, 600, 4096)
]


def _index_cost(c: Call) -> Cost:
    pairs = c.axes["T"] * c.axes["R"] / max(1, c.axes["S"])
    return Cost({"bf16": pairs * c.axes["H"] * (2.0 * c.axes["d"] + 3)})


@operator(
    "q[T,H,d]:act, weights[T,H]:act, keys[R,d]:act, pages[S,P]:i32, slots[T]:int, visible[T]:int -> entries[T,k]:i32",
    variable="T R S P",
    cost=_index_cost,
    judge=Judge("topk", "d"),
    samples=grid(
        _index_inputs,
        [*_INDEX, *({"T": t, "H": 16, "d": 64, "n": 40, "k": 8} for t in (0, 1, 5))],
        families=("normal", "outliers"),
    ),
)
def index_topk(
    q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, slots: Tensor, visible: Tensor, k: int, page: int
) -> Tensor:
    """Choose for every query the k visible entries of highest index score ``Σ_h ReLU(q_h·k_j)·w_h``.

    Products, ReLU, weighting and head sum are each rounded to the carrier as in the official code (float32 inside each). NaN
    scores are never chosen.

    Args:
        q: carrier [T, H, d]; weights: carrier [T, H], scale included.
        keys: carrier [R, d], all index rows; ``pages`` int32 [S, P] and ``page`` locate a sequence's entries.
        slots: [T]; visible: [T] number of visible entries of each query.

    Returns:
        int32 [T, k] entry numbers, ascending, padded with −1. Ties go to the lower entry.

    Source: spec §2.7; faults B03, B21, B33, B72.
    """
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for slot in sorted(set(slots.tolist())):
        mine = torch.nonzero(slots == slot)[:, 0]
        most = int(visible[mine].max())
        if most == 0:
            continue
        j = torch.arange(most, device=q.device)
        held = up(keys[pages[slot].long()[j // page] * page + j % page])
        per = max(1, _GATHER_LIMIT // (most * q.shape[1]))
        for start in range(0, mine.shape[0], per):
            part = mine[start : start + per]
            scores = _index_scores(q[part], weights[part], held)
            out[part] = _best(scores, visible[part], k)
    return out


def _index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    dots = torch.einsum("thd,nd->thn", up(q), keys).to(q.dtype)
    return up(dots.relu() * weights[..., None]).sum(1).to(q.dtype)


def _best(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Entry numbers of the k best visible scores, ascending, −1 behind them."""
    n = scores.shape[1]
    entry = torch.arange(n, device=scores.device)
    hidden = (entry[None, :] >= visible[:, None]) | scores.isnan()
    least = torch.finfo(scores.dtype).min  # a visible -inf still comes before what is hidden
    ranked = scores.clamp(min=least).masked_fill(hidden, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.where(hidden.gather(1, order), n, order).sort(dim=-1).values
    chosen = torch.where(chosen == n, -1, chosen).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)


def _attention_inputs(draw: Draw, T: int, H: int, d: int, W: int, M: int) -> tuple[Any, ...]:
    window = draw.ints("window_rows", T, W, low=-1, high=W + 9).to(torch.int32)
    entry = draw.ints("entry_rows", T, M, low=-1, high=M + 5).to(torch.int32)
    q, sink = draw.act("q", T, H, d), draw.f32("sink", H)
    return q, draw.act("window", W + 9, d), window, draw.act("entries", M + 5, d), entry, sink, d**-0.5


_ATTENTION = [
    {"T": t, "H": h, "d": 512, "W": 128, "M": m, "full": t > 1}
    for t in (1, 32)
    for h, m in ((64, 0), (64, 512), (128, 1024))
] + [{"T": t, "H": 3, "d": 64, "W": w, "M": m} for t, w, m in ((0, 8, 4), (1, 1, 0), (5, 8, 12))]


def _attention_cost(c: Call) -> Cost:
    a = c.axes
    pairs = a["T"] * (a["W"] + a["M"])
    row = a["d"] * c.tensors["window"].dtype.itemsize
    return Cost({"bf16": 4.0 * pairs * a["H"] * a["d"]}, pairs * (row + 4.0) + 2.0 * a["T"] * a["H"] * row)


@operator(
    "q[T,H,d]:act, window[R,d]:act, window_rows[T,W]:i32, entries[C,d]:act, entry_rows[T,M]:i32, sink[H]:f32"
    " -> o[T,H,d]:q",
    variable="T R W C M",
    cost=_attention_cost,
    judge=Judge("bound", "W+M"),
    samples=grid(_attention_inputs, _ATTENTION, families=("normal", "outliers")),
)
def sparse_attention(
    q: Tensor, window: Tensor, window_rows: Tensor, entries: Tensor, entry_rows: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """Attention of each query over its own list of rows; a row is both key and value; the sink joins the denominator.

    ``o = Σ bf16(p_i)·row_i / (Σ p_i + exp(sink − m))`` with ``p_i = exp(q·row_i·scale − m)`` and m the maximum over real rows.
    A query whose rows are all −1 gives zeros.

    Args:
        q: carrier [T, H, d].
        window, entries: carrier [R, d] and [C, d] row pools (two caches, as page sizes differ).
        window_rows, entry_rows: int32 [T, W] and [T, M], −1 for no row.
        sink: float32 [H] logits.

    Source: spec §2.5 step 7; faults B17, B18.
    """
    width = window_rows.shape[1] + entry_rows.shape[1]
    per = max(1, _GATHER_LIMIT // max(1, width * (q.shape[2] + q.shape[1])))
    out = torch.zeros_like(q)
    for start in range(0, q.shape[0], per):
        part = slice(start, start + per)
        rows = torch.cat((_take(window, window_rows[part]), _take(entries, entry_rows[part])), dim=1)
        ids = torch.cat((window_rows[part], entry_rows[part]), dim=1)
        out[part] = _attend(q[part], rows, ids >= 0, sink, scale)
    return out


def _take(pool: Tensor, ids: Tensor) -> Tensor:
    """Rows of ``pool`` [R, d] by ids [T, N]; −1 takes any row, or zeros from a pool that has none."""
    if pool.shape[0] == 0 and bool((ids < 0).all()):
        return pool.new_zeros(*ids.shape, pool.shape[1])
    return pool[ids.clamp(min=0).long()]


def _attend(q: Tensor, rows: Tensor, real: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One block of queries over gathered rows [T, N, d]; ``real`` [T, N] marks rows that exist."""
    acc = accumulator(q.dtype)
    keys = rows.to(acc).masked_fill(~real[..., None], 0)  # a stale NaN in a masked row must not reach 0·NaN
    s = torch.einsum("thd,tnd->thn", q.to(acc), keys) * scale
    s = s.masked_fill(~real[:, None, :], -torch.inf)
    m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -torch.inf)
    m = m.masked_fill(m == -torch.inf, 0)
    p = (s - m).exp()
    total = p.sum(-1, keepdim=True) + (sink.to(acc)[None, :, None] - m).exp()
    o = torch.einsum("thn,tnd->thd", p.to(q.dtype).to(acc), keys)
    return (o / total.masked_fill(total == 0, 1)).to(q.dtype)  # no row and a sink of -inf: zeros, not 0/0


def _query_inputs(draw: Draw, T: int, H: int, d: int) -> tuple[Any, ...]:
    return draw.act("q", T, H, d), draw.ints("positions", T, high=100_000), frequencies(64, 10_000.0), 1e-6


@operator(
    "q[T,H,d]:act, positions[T]:int, freqs[F]:f32 -> y[T,H,d]:q",
    level="fused",
    composite=True,
    cost=lambda c: Cost({"vector": c.axes["T"] * c.axes["H"] * (4.0 * c.axes["d"] + 6.0 * c.axes["F"])}),
    judge=Judge("bound", "d"),
    samples=grid(_query_inputs, [{"T": t, "H": h, "d": 512, "full": t > 1} for t in (0, 1, 64) for h in (64, 128)]),
)
def query_norm_rope(q: Tensor, positions: Tensor, freqs: Tensor, eps: float) -> Tensor:
    """Per-head unweighted norm, then rotation of the last dims: carrier [T, H, d] (spec §2.5 steps 2-3)."""
    return rope(head_rms_norm(q, eps), positions, freqs)


def _kv_inputs(draw: Draw, T: int, d: int, kind: str) -> tuple[Any, ...]:
    pool, rows, x = _write_inputs(draw, T, d)
    norm = draw.f32("norm", d, scale=0.1, center=1.0)
    return pool, rows, x, norm, draw.ints("positions", T, high=100_000), frequencies(64, 10_000.0), 1e-6, kind


@operator(
    "pool[R,d]:act, rows[T]:int, x[T,d]:act, norm[d]:f32, positions[T]:int, freqs[F]:f32 ->",
    level="fused",
    variable="T R",
    writes="pool",
    composite=True,
    cost=lambda c: Cost({"vector": 10.0 * c.axes["T"] * c.axes["d"]}, 4.0 * c.axes["T"] * c.axes["d"]),
    judge=Judge("bound", "d"),
    samples=grid(
        _kv_inputs,
        [{"T": t, "d": 512, "kind": k, "full": t > 1} for t in (0, 1, 64) for k in ("kv", "plain")],
        families=("normal",),
    ),
)
def write_kv(
    pool: Tensor, rows: Tensor, x: Tensor, norm: Tensor, positions: Tensor, freqs: Tensor, eps: float, kind: str
) -> None:
    """Norm, rotate and quantise projected rows x [T, d] (``kind`` as in :func:`quantise_row`), then write them to ``pool``.

    Source: spec §2.5 step 4.
    """
    row = rope(rms_norm(x, norm, eps)[:, None, :], positions, freqs)[:, 0]
    write_rows(pool, rows, quantise_row(row, 2 * freqs.shape[0], kind))
