"""The tensors of an official checkpoint: name, dtype and shape, computed from the configuration alone (spec §4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from hal.errors import UsageError
from hal_model.config import ModelConfig

Kind = Literal["dense", "expert", "carrier", "float", "table"]
Experts = Literal["fp4", "fp8", "bf16", "f32"]
Dense = Literal["fp8", "bf16", "f32"]

FP8_BLOCK = 128
FP4_BLOCK = 32

#: safetensors dtype name -> torch dtype, of every dtype that this build reads
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor; ``dtype`` is the safetensors name (``F8_E4M3``; FP4 pairs are ``I8`` [N, K/2])."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that it loads as."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model before a storage format is chosen.

    ``kind``: ``dense`` and ``expert`` are quantised linears [N, K] with a ``.scale`` beside ``.weight``; ``carrier`` is
    BF16 in the releases, ``float`` F32 and ``table`` I64.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def scale_name(self) -> str:
        """Name of the scale tensor of a quantised linear."""
        return self.name.removesuffix("weight") + "scale"


def tensors(
    config: ModelConfig,
    experts: Experts = "fp4",
    dense: Dense = "fp8",
    *,
    scales: Literal["F8_E8M0", "F32"] = "F8_E8M0",
    backbone: bool = True,
    draft: bool = True,
) -> Iterator[TensorSpec]:
    """Every stored tensor in file order: embedding, layers, head, draft stages.

    Args:
        config: the model.
        experts: storage of the routed experts.
        dense: storage of the other quantised linears; ``f32`` stores every floating-point tensor in F32.
        scales: dtype of the scale tensors.
        backbone: whether to list everything but the ``mtp.*`` tensors.
        draft: whether to list the ``mtp.*`` tensors.

    Raises:
        UsageError: unknown ``experts`` or ``dense``.
    """
    if experts not in ("fp4", "fp8", "bf16", "f32") or dense not in ("fp8", "bf16", "f32"):
        raise UsageError(f"experts={experts!r}, dense={dense!r}; right: fp4, fp8, bf16 or f32, and fp8, bf16 or f32")
    for parameter in parameters(config, backbone=backbone, draft=draft):
        yield from _stored(parameter, experts, dense, scales)


def quantised(parameter: Parameter, fmt: str, scales: str = "F8_E8M0") -> tuple[TensorSpec, TensorSpec]:
    """Weight and scale of a linear [N, K] stored as ``fp8`` (128 x 128 blocks) or ``fp4`` (rows of 32), spec §3.2."""
    n, k = parameter.shape
    if fmt == "fp8":
        weight, blocks = TensorSpec(parameter.name, "F8_E4M3", (n, k)), (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    else:
        weight, blocks = TensorSpec(parameter.name, "I8", (n, k // 2)), (n, k // FP4_BLOCK)
    return weight, TensorSpec(parameter.scale_name, scales, blocks)


def _stored(parameter: Parameter, experts: str, dense: str, scales: str) -> Iterator[TensorSpec]:
    fmt = {"expert": experts, "dense": dense}.get(parameter.kind)
    if fmt in ("fp4", "fp8"):
        yield from quantised(parameter, fmt, scales)
        return
    plain = {"float": "F32", "table": "I64"}.get(parameter.kind, "F32" if (fmt or dense) == "f32" else "BF16")
    yield TensorSpec(parameter.name, plain, parameter.shape)


def parameters(config: ModelConfig, *, backbone: bool = True, draft: bool = True) -> Iterator[Parameter]:
    """Every tensor of the model in file order, before a storage format is chosen; scales are not listed."""
    if backbone:
        vocabulary = (config.vocab_size, config.hidden_size)
        yield Parameter("embed.weight", "carrier", vocabulary)
        for layer, ratio in enumerate(config.compress_ratios):
            yield from _block(config, f"layers.{layer}.", ratio, hashed=layer < config.num_hash_layers)
        yield from _collapse(config, "")
        yield Parameter("head.weight", "carrier", vocabulary)
    if draft:
        for stage, ratio in enumerate(config.draft_ratios):
            yield from _block(config, f"mtp.{stage}.", ratio, hashed=False)
            yield from _draft_extras(config, stage)


def _block(c: ModelConfig, p: str, ratio: int, *, hashed: bool) -> Iterator[Parameter]:
    mixes = (2 + c.hc_mult) * c.hc_mult
    for site in ("attn", "ffn"):
        yield Parameter(f"{p}{site}_norm.weight", "carrier", (c.hidden_size,))
        yield Parameter(f"{p}hc_{site}_fn", "float", (mixes, c.hc_mult * c.hidden_size))
        yield Parameter(f"{p}hc_{site}_base", "float", (mixes,))
        yield Parameter(f"{p}hc_{site}_scale", "float", (3,))
    yield from _attention(c, p + "attn.")
    if ratio:
        yield from _compressor(c, p + "attn.compressor.", ratio, c.head_dim)
    if ratio == 4:
        yield from _indexer(c, p + "attn.indexer.", ratio)
    yield from _moe(c, p + "ffn.", hashed=hashed)


def _attention(c: ModelConfig, p: str) -> Iterator[Parameter]:
    heads = c.num_attention_heads * c.head_dim
    low = c.o_groups * c.o_lora_rank
    yield Parameter(p + "attn_sink", "float", (c.num_attention_heads,))
    yield Parameter(p + "wq_a.weight", "dense", (c.q_lora_rank, c.hidden_size))
    yield Parameter(p + "q_norm.weight", "carrier", (c.q_lora_rank,))
    yield Parameter(p + "wq_b.weight", "dense", (heads, c.q_lora_rank))
    yield Parameter(p + "wkv.weight", "dense", (c.head_dim, c.hidden_size))
    yield Parameter(p + "kv_norm.weight", "carrier", (c.head_dim,))
    yield Parameter(p + "wo_a.weight", "dense", (low, heads // c.o_groups))
    yield Parameter(p + "wo_b.weight", "dense", (c.hidden_size, low))


def _compressor(c: ModelConfig, p: str, ratio: int, width: int) -> Iterator[Parameter]:
    width_in = width * (2 if ratio == 4 else 1)  # ratio 4 overlaps: two halves per row
    yield Parameter(p + "ape", "float", (ratio, width_in))
    yield Parameter(p + "wkv.weight", "carrier", (width_in, c.hidden_size))
    yield Parameter(p + "wgate.weight", "carrier", (width_in, c.hidden_size))
    yield Parameter(p + "norm.weight", "carrier", (width,))


def _indexer(c: ModelConfig, p: str, ratio: int) -> Iterator[Parameter]:
    yield Parameter(p + "wq_b.weight", "dense", (c.index_n_heads * c.index_head_dim, c.q_lora_rank))
    yield Parameter(p + "weights_proj.weight", "carrier", (c.index_n_heads, c.hidden_size))
    yield from _compressor(c, p + "compressor.", ratio, c.index_head_dim)


def _moe(c: ModelConfig, p: str, *, hashed: bool) -> Iterator[Parameter]:
    yield Parameter(p + "gate.weight", "carrier", (c.n_routed_experts, c.hidden_size))
    if hashed:
        yield Parameter(p + "gate.tid2eid", "table", (c.vocab_size, c.num_experts_per_tok))
    else:
        yield Parameter(p + "gate.bias", "float", (c.n_routed_experts,))
    yield from _expert(c, p + "shared_experts.", "dense")
    for expert in range(c.n_routed_experts):
        yield from _expert(c, f"{p}experts.{expert}.", "expert")


def _expert(c: ModelConfig, p: str, kind: Kind) -> Iterator[Parameter]:
    for name in ("w1", "w2", "w3"):
        rows, columns = c.moe_intermediate_size, c.hidden_size
        yield Parameter(f"{p}{name}.weight", kind, (columns, rows) if name == "w2" else (rows, columns))


def _collapse(c: ModelConfig, p: str) -> Iterator[Parameter]:
    """What turns four streams into one before the head."""
    yield Parameter(p + "norm.weight", "carrier", (c.hidden_size,))
    yield Parameter(p + "hc_head_fn", "float", (c.hc_mult, c.hc_mult * c.hidden_size))
    yield Parameter(p + "hc_head_base", "float", (c.hc_mult,))
    yield Parameter(p + "hc_head_scale", "float", (1,))


def _draft_extras(c: ModelConfig, stage: int) -> Iterator[Parameter]:
    p, width = f"mtp.{stage}.", c.hidden_size
    if c.dspark is None:
        yield Parameter(p + "e_proj.weight", "dense", (width, width))
        yield Parameter(p + "h_proj.weight", "dense", (width, width))
        yield Parameter(p + "enorm.weight", "carrier", (width,))
        yield Parameter(p + "hnorm.weight", "carrier", (width,))
        yield from _collapse(c, p)
        return
    if stage == 0:
        yield Parameter(p + "main_proj.weight", "dense", (width, len(c.dspark.target_layer_ids) * width))
        yield Parameter(p + "main_norm.weight", "carrier", (width,))
    if stage == c.draft_stages - 1:
        yield from _collapse(c, p)
        for name in ("markov_w1", "markov_w2"):
            yield Parameter(f"{p}markov_head.{name}.weight", "carrier", (c.vocab_size, c.dspark.markov_rank))
        yield Parameter(p + "confidence_head.proj.weight", "carrier", (1, width + c.dspark.markov_rank))
