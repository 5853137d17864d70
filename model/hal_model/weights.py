"""The weights of DeepSeek V4 as the layers read them; names are the checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hal_ops import Weight


@dataclass(frozen=True)
class Site:
    """One hyper-connection site: mixing parameters float32, and the norm of the sub-layer behind it, float32 [D]."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Compressor:
    """wkv, wgate [lanes·d, D]; ape float32 [ratio, lanes·d]; norm float32 [d]."""

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Indexer:
    """wq_b [heads·d, q_lora]; weights_proj carrier [heads, D]; its own compressor."""

    wq_b: Weight
    weights_proj: Tensor
    compressor: Compressor


@dataclass(frozen=True)
class Attention:
    """Projections of one attention; wo_a carrier [groups, o_lora, H·d/groups]; sink float32 [H]."""

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    wo_a: Tensor
    wo_b: Weight
    sink: Tensor
    compressor: Compressor | None
    indexer: Indexer | None


@dataclass(frozen=True)
class Moe:
    """gate [E, D]; bias float32 [E] or table int [vocab, K]; experts and shared expert, gate and up stacked in w13."""

    gate: Tensor
    bias: Tensor | None
    table: Tensor | None
    w13: Weight
    w2: Weight
    shared_w13: Weight
    shared_w2: Weight


@dataclass(frozen=True)
class Layer:
    """One block: attention site, then expert site."""

    attn_site: Site
    attn: Attention
    ffn_site: Site
    moe: Moe


@dataclass(frozen=True)
class Head:
    """Collapse and norm before the vocabulary product, float32."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction block: its two projections, norms, layer and head."""

    e_proj: Weight
    h_proj: Weight
    enorm: Tensor
    hnorm: Tensor
    layer: Layer
    head: Head


@dataclass(frozen=True)
class Weights:
    """The whole model: embed and lm_head [vocab, D]."""

    embed: Tensor
    layers: tuple[Layer, ...]
    head: Head
    lm_head: Tensor
    mtp: Mtp | None
