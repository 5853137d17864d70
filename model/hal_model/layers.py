"""DeepSeek V4, written once against operators (spec §2). No chip, no dispatch, no shapes that are not in the config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.operator import Judge, operator
from hal_model.weights import Attention, Compressor, Head, Indexer, Layer, Moe, Mtp
from hal_ops import (
    compress_entries,
    embed,
    gate_hash,
    gate_topk,
    grouped_linear,
    hc_enter,
    hc_head,
    hc_post,
    index_topk,
    linear,
    linear_dense,
    linear_fp32,
    lm_head,
    moe_experts,
    page_rows,
    query_norm_rope,
    rms_norm,
    rope,
    shared_expert,
    sparse_attention,
    write_kv,
    write_rows,
)
from hal_ops.compress import quantise_row


@dataclass(frozen=True)
class Geometry:
    """What a layer needs of the config beside its weights' shapes."""

    heads: int
    head_dim: int
    groups: int
    index_heads: int
    index_topk: int
    experts_per_token: int
    route_scale: float
    swiglu_limit: float
    norm_eps: float
    hc_eps: float
    hc_iterations: int
    quantised_state: bool

    @property
    def kv_kind(self) -> str:
        """How attention rows are rounded."""
        return "kv" if self.quantised_state else "plain"

    @property
    def index_kind(self) -> str:
        """How index queries and keys are rounded."""
        return "index" if self.quantised_state else "plain"


@dataclass(frozen=True)
class Cache:
    """One layer's part of the state arena: row pools [rows, d] and compressor rings [slots, L, 2W]."""

    window: Tensor
    entries: Tensor
    ring: Tensor | None = None
    index: Tensor | None = None
    index_ring: Tensor | None = None


@dataclass(frozen=True)
class Entries:
    """Where one compression ratio's entries of this step come from, go to and are seen.

    closing: tokens that close an entry [C]; write: pool row of each [C]; visible: entries seen by each token [T];
    pages: int32 [slots, P]; page: rows per page; most: the largest of ``visible``, known to the host.
    """

    closing: Tensor
    write: Tensor
    visible: Tensor
    pages: Tensor
    page: int
    most: int


@dataclass(frozen=True)
class Step:
    """Inputs of one step: T tokens of one or more sequences, those of a sequence consecutive.

    tokens, positions, slots, offsets: int64 [T]; window_write: int32 [T]; window_rows: int32 [T, W]; last: int64 [B], the
    last token of each sequence; csa, hca: entries of ratio 4 and 128.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    offsets: Tensor
    window_write: Tensor
    window_rows: Tensor
    last: Tensor
    csa: Entries
    hca: Entries


def _compress(
    x: Tensor, w: Compressor, ring: Tensor, s: Step, e: Entries, freqs: Tensor, g: Geometry, kind: str
) -> Tensor:
    """New entries [C, d] of this step (spec §2.6)."""
    lanes = w.wkv.shape[0] // w.norm.shape[0]
    return compress_entries(
        linear_fp32(x, w.wkv),
        linear_fp32(x, w.wgate),
        w.ape,
        ring,
        s.slots,
        s.positions,
        s.offsets,
        e.closing,
        lanes,
        x.dtype,
        w.norm,
        freqs,
        g.norm_eps,
        kind,
    )


def _select(x: Tensor, qr: Tensor, w: Indexer, cache: Cache, s: Step, freqs: Tensor, g: Geometry) -> Tensor:
    """Entry numbers [T, k] that each query attends to in a ratio-4 layer (spec §2.7)."""
    assert cache.index is not None
    assert cache.index_ring is not None
    keys = _compress(x, w.compressor, cache.index_ring, s, s.csa, freqs, g, g.index_kind)
    write_rows(cache.index, s.csa.write, keys)
    q = rope(linear(qr, w.wq_b).unflatten(1, (g.index_heads, -1)), s.positions, freqs)
    weights = linear_dense(x, w.weights_proj) * (q.shape[-1] ** -0.5 * g.index_heads**-0.5)
    k = min(g.index_topk, s.csa.most)
    return index_topk(
        quantise_row(q, 2 * freqs.shape[0], g.index_kind),
        weights,
        cache.index,
        s.csa.pages,
        s.slots,
        s.csa.visible,
        k,
        s.csa.page,
    )


def _all_visible(e: Entries) -> Tensor:
    """Entry numbers [T, most] of every visible entry, −1 where a query sees fewer."""
    entry = torch.arange(e.most, device=e.visible.device, dtype=torch.int32)
    return torch.where(entry[None, :] < e.visible[:, None], entry[None, :], -1).to(torch.int32)


def _entry_rows(x: Tensor, qr: Tensor, w: Attention, cache: Cache, s: Step, freqs: Tensor, g: Geometry) -> Tensor:
    """Write this step's entries and list the entry rows [T, M] of each query (spec §2.5 step 6)."""
    if w.compressor is None:
        return s.window_rows[:, :0]
    e = s.csa if w.indexer else s.hca
    assert cache.ring is not None
    new = _compress(x, w.compressor, cache.ring, s, e, freqs, g, g.kv_kind)
    write_rows(cache.entries, e.write, new)
    chosen = _select(x, qr, w.indexer, cache, s, freqs, g) if w.indexer else _all_visible(e)
    return page_rows(chosen, s.slots, e.pages, e.page)


@operator(
    "x[T,D]:act, freqs[F]:f32 -> y[T,D]:x",
    level="block",
    composite=True,
    writes="cache",
    judge=Judge("bound", "D"),
)
def attention(x: Tensor, freqs: Tensor, kind: str, w: Attention, cache: Cache, s: Step, g: Geometry) -> Tensor:  # noqa: ARG001
    """Attention over the window and compressed entries (spec §2.5).

    Args:
        x: normed input, carrier [T, D].
        freqs: the layer's rotary frequencies float32 [F].
        kind: ``sliding``, ``csa`` or ``hca``; distinguishes layers in a plan.
    """
    qr = rms_norm(linear(x, w.wq_a), w.q_norm, g.norm_eps)
    q = query_norm_rope(linear(qr, w.wq_b).unflatten(1, (g.heads, -1)), s.positions, freqs, g.norm_eps)
    write_kv(cache.window, s.window_write, linear(x, w.wkv), w.kv_norm, s.positions, freqs, g.norm_eps, g.kv_kind)
    rows = _entry_rows(x, qr, w, cache, s, freqs, g)
    o = sparse_attention(q, cache.window, s.window_rows, cache.entries, rows, w.sink, g.head_dim**-0.5)
    o = rope(o, s.positions, freqs, inverse=True)
    z = grouped_linear(o.flatten(1).unflatten(1, (g.groups, -1)), w.wo_a)
    return linear(z.flatten(1), w.wo_b)


@operator("x[T,D]:act, tokens[T]:int -> y[T,D]:x", level="block", composite=True, judge=Judge("bound", "D"))
def moe(x: Tensor, tokens: Tensor, kind: str, w: Moe, g: Geometry) -> Tensor:  # noqa: ARG001
    """Router, routed experts and the shared expert (spec §2.8); ``kind`` is ``hash`` or ``score``."""
    logits = linear_fp32(x, w.gate)
    if w.table is not None:
        ids, weights = gate_hash(logits, tokens, w.table, g.route_scale)
    else:
        assert w.bias is not None
        ids, weights = gate_topk(logits, w.bias, g.experts_per_token, g.route_scale)
    routed = moe_experts(x, ids, weights, w.w13, w.w2, g.swiglu_limit)
    return (routed + shared_expert(x, w.shared_w13, w.shared_w2, g.swiglu_limit)).to(x.dtype)


@operator(
    "streams[T,S,D]:act, freqs[F]:f32 -> out[T,S,D]:streams",
    level="layer",
    composite=True,
    writes="cache",
    judge=Judge("bound", "D"),
)
def decoder_layer(
    streams: Tensor, freqs: Tensor, kind: str, gate: str, w: Layer, cache: Cache, s: Step, g: Geometry
) -> Tensor:
    """One block on the residual streams, carrier [T, S, D]: attention site, then expert site (spec §2.2)."""
    a = w.attn_site
    x, post, comb = hc_enter(streams, a.fn, a.scale, a.base, a.norm, g.norm_eps, g.hc_eps, g.hc_iterations)
    streams = hc_post(attention(x, freqs, kind, w.attn, cache, s, g), streams, post, comb)
    f = w.ffn_site
    x, post, comb = hc_enter(streams, f.fn, f.scale, f.base, f.norm, g.norm_eps, g.hc_eps, g.hc_iterations)
    return hc_post(moe(x, s.tokens, gate, w.moe, g), streams, post, comb)


def expand(ids: Tensor, table: Tensor, streams: int) -> Tensor:
    """Embed ids [T] and repeat over the residual streams: carrier [T, S, D] (spec §2.1)."""
    return embed(ids, table)[:, None, :].expand(-1, streams, -1).contiguous()


def logits(streams: Tensor, head: Head, vocab: Tensor, g: Geometry) -> Tensor:
    """Vocabulary logits float32 [B, V] of residual streams [B, S, D] (spec §2.9)."""
    u = hc_head(streams, head.fn, head.scale, head.base, g.norm_eps, g.hc_eps)
    return lm_head(rms_norm(u, head.norm, g.norm_eps), vocab)


def mtp(
    streams: Tensor, next_ids: Tensor, table: Tensor, freqs: Tensor, w: Mtp, cache: Cache, s: Step, g: Geometry
) -> Tensor:
    """The draft block's output streams [T, S, D] from the backbone's streams and the next token ids [T] (spec §2.10).

    It is fed the streams before any collapse (pitfall V4), and its layer is a sliding one.
    """
    e = linear(rms_norm(embed(next_ids, table), w.enorm, g.norm_eps), w.e_proj)
    h = linear(rms_norm(streams, w.hnorm, g.norm_eps).flatten(0, 1), w.h_proj).view_as(streams)
    return decoder_layer(h + e[:, None, :], freqs, "sliding", "score", w.layer, cache, s, g)
