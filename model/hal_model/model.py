"""One loaded model: weights, rotary tables and the functions that run a step; what ``bind`` traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hal.plan import Bucket
from hal_model.config import ModelConfig
from hal_model.layers import Cache, Entries, Geometry, Step, decoder_layer, expand, logits, mtp
from hal_model.state import KIND, PAGE, Limits, State
from hal_model.weights import Weights
from hal_ops import penalize, sample
from hal_ops.rotary import frequencies, yarn_frequencies


@dataclass(frozen=True)
class Numerics:
    """The carrier dtype, and whether state rows are rounded as trained (False gives the structural model)."""

    carrier: torch.dtype = torch.bfloat16
    quantised_state: bool = True


@dataclass(frozen=True)
class Model:
    """Config, weights and per-layer rotary frequencies on one device."""

    config: ModelConfig
    weights: Weights
    numerics: Numerics
    geometry: Geometry
    freqs: tuple[Tensor, ...]

    @classmethod
    def build(cls, config: ModelConfig, weights: Weights, numerics: Numerics, device: torch.device) -> Model:
        """Derive geometry and rotary tables from the config."""
        freqs = {r: _frequencies(config, r).to(device) for r in (0, 4, 128)}
        ratios = (*config.compress_ratios, *config.draft_ratios)
        return cls(config, weights, numerics, _geometry(config, numerics), tuple(freqs[r] for r in ratios))

    def kind(self, layer: int) -> str:
        """``sliding``, ``csa`` or ``hca``."""
        return KIND[self.config.compress_ratios[layer]]


def _frequencies(c: ModelConfig, ratio: int) -> Tensor:
    """Plain base for sliding layers; the other base with YaRN for everything in compressed ones (spec §2.4, B11)."""
    if ratio == 0:
        return frequencies(c.qk_rope_head_dim, c.rope_theta)
    y = c.rope_scaling
    return yarn_frequencies(
        c.qk_rope_head_dim,
        c.compress_rope_theta,
        factor=y.factor,
        beta_fast=y.beta_fast,
        beta_slow=y.beta_slow,
        original_length=y.original_max_position_embeddings,
    )


def _geometry(c: ModelConfig, n: Numerics) -> Geometry:
    return Geometry(
        c.num_attention_heads,
        c.head_dim,
        c.o_groups,
        c.index_n_heads,
        c.index_topk,
        c.num_experts_per_tok,
        c.routed_scaling_factor,
        c.swiglu_limit,
        c.rms_norm_eps,
        c.hc_eps,
        c.hc_sinkhorn_iters,
        n.quantised_state,
    )


def backbone(m: Model, caches: Sequence[Cache], s: Step) -> Tensor:
    """Residual streams carrier [T, S, D] after the last layer; writes the state of the step's tokens."""
    streams = expand(s.tokens, m.weights.embed, m.config.hc_mult)
    for i, layer in enumerate(m.weights.layers):
        gate = "hash" if layer.moe.table is not None else "score"
        streams = decoder_layer(streams, m.freqs[i], m.kind(i), gate, layer, caches[i], s, m.geometry)
    return streams


def head(m: Model, streams: Tensor) -> Tensor:
    """Logits float32 [B, V] of chosen rows of the residual streams [B, S, D]."""
    return logits(streams, m.weights.head, m.weights.lm_head, m.geometry)


def forward(m: Model, caches: Sequence[Cache], s: Step) -> Tensor:
    """One step: logits float32 [B, V] at the last token of each sequence."""
    return head(m, backbone(m, caches, s)[s.last])


def draft(m: Model, caches: Sequence[Cache], streams: Tensor, next_ids: Tensor, s: Step) -> Tensor:
    """Multi-token prediction (spec §2.10): logits float32 [T, V] for the token after ``next_ids`` [T]."""
    w = m.weights.mtp
    if w is None:
        raise ValueError("the checkpoint holds no MTP block")
    n = m.config.num_hidden_layers
    out = mtp(streams, next_ids, m.weights.embed, m.freqs[n], w, caches[n], s, m.geometry)
    return logits(out, w.head, m.weights.lm_head, m.geometry)


def _powers(limit: int) -> list[tuple[int, int]]:
    """(1,1), (2,2), (3,4), (5,8) … up to ``limit``."""
    edges, high = [], 1
    while True:
        edges.append((high // 2 + 1, min(high, limit)))
        if high >= limit:
            return edges
        high *= 2


@dataclass(frozen=True)
class Traceable:
    """A model with limits, as :func:`hal.plan.bind` wants it."""

    model: Model
    limits: Limits
    caches: tuple[Cache, ...]

    @classmethod
    def of(cls, model: Model, limits: Limits, state: State) -> Traceable:
        """Trace against the shapes of ``state``; no memory of it is touched."""
        return cls(model, limits, tuple(_meta_cache(c) for c in state.caches))

    def buckets(self) -> list[Bucket]:
        """Decode buckets by sequences (powers of two), prefill buckets by tokens (powers of eight)."""
        decode = [Bucket("decode", *edge) for edge in _powers(self.limits.max_batch_size)]
        edges = [n for n in (16, 128, 1024, 8192) if n < self.limits.max_step_tokens]
        highs = [*edges, self.limits.max_step_tokens]
        lows = [1, *(h + 1 for h in highs[:-1])]
        return decode + [Bucket("prefill", low, high) for low, high in zip(lows, highs, strict=True)]

    def trace(self, bucket: Bucket, tokens: int) -> None:  # noqa: ARG002
        """One step of ``tokens`` tokens on meta tensors, sampling included."""
        rows = min(tokens, self.limits.max_batch_size)
        step = _meta_step(self.limits, tokens, rows, self.model.config.sliding_window)
        streams = backbone(self.model, self.caches, step)
        if self.model.weights.mtp is not None:
            draft(self.model, self.caches, streams, step.tokens, step)
        penalties, values, integers = _meta_choice(rows, self.model.config.vocab_size)
        choose(head(self.model, streams[step.last]), penalties, values, integers)


Penalties = tuple[Tensor, Tensor, Tensor]


def choose(scores: Tensor, penalties: Penalties | None, shape: Tensor, integers: Tensor) -> Tensor:
    """Penalise and sample: next ids int64 [B].

    Args:
        scores: float32 [B, V].
        penalties: None, or counts int32 [B, V], seen bool [B, V] and float32 [3, B] repetition, presence, frequency.
        shape: float32 [3, B] temperature, top-p, min-p.
        integers: int64 [3, B] top-k, seed, step.
    """
    if penalties is not None:
        counts, seen, values = penalties
        scores = penalize(scores, counts, seen, values[0], values[1], values[2])
    return sample(scores, shape[0], integers[0], shape[1], shape[2], integers[1], integers[2])


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta_choice(rows: int, vocab: int) -> tuple[Penalties, Tensor, Tensor]:
    counts, seen = _empty(rows, vocab, dtype=torch.int32), _empty(rows, vocab, dtype=torch.bool)
    f32 = _empty(3, rows, dtype=torch.float32)
    return (counts, seen, f32), f32, _empty(3, rows)


def _meta_cache(c: Cache) -> Cache:
    moved = {k: v.to("meta") for k, v in vars(c).items() if isinstance(v, Tensor)}
    return replace(c, **moved)


def _meta_step(limits: Limits, tokens: int, rows: int, window: int) -> Step:
    def entries(ratio: int) -> Entries:
        closing, most = -(-tokens // ratio), limits.max_seq_len // ratio
        table = _empty(limits.max_batch_size, max(1, -(-most // PAGE[ratio])), dtype=torch.int32)
        write, visible = _empty(closing, dtype=torch.int32), _empty(tokens, dtype=torch.int32)
        return Entries(_empty(closing), write, visible, table, PAGE[ratio], most)

    ids = _empty(tokens)
    write, seen = _empty(tokens, dtype=torch.int32), _empty(tokens, window, dtype=torch.int32)
    return Step(ids, ids, ids, ids, write, seen, _empty(rows), entries(4), entries(128))
