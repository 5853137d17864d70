"""Configuration of a DeepSeek V4 model: every width, count and layer kind that the model code reads (spec §1).

A `ModelConfig` is checked when it is made, from a file or by hand: one `CheckpointError` names every field that is
wrong, the value seen and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hal_model.config_fields import DSPARK, SCALARS, raise_problems, read_fields, read_json

RATIOS = (0, 4, 128)
_QUANT_BLOCK = 128  # FP8 blocks are 128 x 128, and widths must divide (spec §1.5)
_STATE_BLOCK = 64  # block of the state-row quantisation (spec §3.4)
_INDEX_BLOCK = 32


@dataclass(frozen=True)
class Yarn:
    """Rotary scaling of the compressed layers; ``original_max_position_embeddings`` in tokens (spec §2.4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DSpark:
    """The three-stage draft of the 0731, 0813 and DSpark releases (spec §1.4, §2.11)."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek V4 model; field names are those of the releases' ``config.json`` (spec §1.1).

    ``compress_ratios`` holds one ratio (0, 4 or 128; 0 is a pure sliding-window layer) per backbone layer and
    ``draft_ratios`` one per draft stage. ``swiglu_limit`` 0 means no clamp. ``expert_dtype`` is what the file declares;
    what a checkpoint holds is decided by its tensors. ``notes`` lists what the file says and this build does not use;
    ``source`` is the file, for messages. Both are left out of comparison.

    Raises:
        CheckpointError: a field has a wrong type, is out of range, or contradicts another.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_hash_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    compress_ratios: tuple[int, ...]
    draft_ratios: tuple[int, ...]
    expert_dtype: str | None = None
    dspark: DSpark | None = None
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    source: str = field(default="model configuration", compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = list(_type_problems(self))
        raise_problems(self.source, problems or list(_relation_problems(self)))

    @property
    def draft_stages(self) -> int:
        """Draft blocks ``mtp.0 …``: 1 for the preview releases, 3 for DSpark."""
        return len(self.draft_ratios)

    @property
    def nope_head_dim(self) -> int:
        """Dims of a head without rotation (the first ones)."""
        return self.head_dim - self.qk_rope_head_dim

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read either spelling of a configuration (root, reference, newer library); ``source`` names it in messages.

        Raises:
            CheckpointError: naming ``source`` and every field that is missing, contradictory, wrong or out of range.
        """
        values, notes = read_fields(data, source)
        yarn = Yarn(**_as_floats(Yarn, values.pop("rope_scaling")))
        dspark = values.pop("dspark")
        return cls(
            **_as_floats(cls, values),
            rope_scaling=yarn,
            dspark=DSpark(**dspark) if dspark is not None else None,
            notes=notes,
            source=source,
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` of a checkpoint folder, or ``path`` itself when it is a file.

        Raises:
            CheckpointError: the file is missing or not JSON, or as `from_dict`.
        """
        path = Path(path)
        file = path if path.is_file() else path / "config.json"
        return cls.from_dict(read_json(file), str(file))

    def to_dict(self) -> dict[str, Any]:
        """The root spelling; `from_dict` of it equals this configuration."""
        own = {"compress_ratios", "draft_ratios", "rope_scaling", "dspark", "expert_dtype", "notes", "source"}
        out: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        out |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        out |= {"num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc"}
        out |= {"norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
        out |= {"tie_word_embeddings": False, "rope_scaling": {"type": "yarn", **asdict(self.rope_scaling)}}
        out["compress_ratios"] = [*self.compress_ratios, *self.draft_ratios]
        if self.expert_dtype is not None:
            out["expert_dtype"] = self.expert_dtype
        if self.dspark is not None:
            values = asdict(self.dspark) | {"target_layer_ids": list(self.dspark.target_layer_ids)}
            out |= {name: values[name.removeprefix("dspark_")] for name in DSPARK}
            out["n_mtp_layers"] = self.draft_stages
        return out


def _as_floats(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with JSON integers turned to float where the field of ``cls`` is one."""
    kinds = {f.name: f.type for f in fields(cls)}
    return {k: float(v) if kinds[k] == "float" and type(v) is int else v for k, v in values.items()}


_ZERO_ALLOWED = {"num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id", "swiglu_limit"}
_ZERO_ALLOWED |= {"dspark.noise_token_id"}


def _type_problems(config: ModelConfig) -> Iterator[str]:
    yield from _scalar_problems(config, "")
    yield from _scalar_problems(config.rope_scaling, "rope_scaling.")
    if config.dspark is not None:
        yield from _scalar_problems(config.dspark, "dspark.")
        yield from _tuple_problems("dspark_target_layer_ids", config.dspark.target_layer_ids, None)
    yield from _tuple_problems("compress_ratios", config.compress_ratios, RATIOS)
    yield from _tuple_problems("compress_ratios (draft entries)", config.draft_ratios, RATIOS)
    if config.expert_dtype not in (None, "fp4", "fp8"):
        yield f"field expert_dtype is {config.expert_dtype!r}; right: 'fp4', 'fp8' or no such field"


def _label(name: str) -> str:
    """A field as a message names it: with its other spelling, since the file may use that one."""
    other = SCALARS.get(name)
    return name.replace("dspark.", "dspark_") if other in (None, name) else f"{name} (or {other})"


def _scalar_problems(part: Any, prefix: str) -> Iterator[str]:
    for f in fields(part):
        value, name = getattr(part, f.name), prefix + f.name
        label = _label(name)
        lowest = "0 or more" if name in _ZERO_ALLOWED else "above 0"
        low_ok = not isinstance(value, int | float) or (value >= 0 if name in _ZERO_ALLOWED else value > 0)
        if f.type == "int" and (type(value) is not int or not low_ok):
            yield f"field {label} is {value!r}; right: an integer {lowest}"
        elif f.type == "float" and (type(value) not in (int, float) or not math.isfinite(value) or not low_ok):
            yield f"field {label} is {value!r}; right: a finite number {lowest}"


def _tuple_problems(name: str, values: Any, allowed: tuple[int, ...] | None) -> Iterator[str]:
    if not isinstance(values, tuple):
        yield f"field {name} is {values!r}; right: a list"
        return
    for i, value in enumerate(values):
        if type(value) is not int or (allowed is not None and value not in allowed):
            right = f"one of {', '.join(map(str, allowed))}" if allowed else "an integer"
            yield f"field {name}[{i}] is {value!r}; right: {right}"


def _multiples(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(expression, its value, what it must be a multiple of), spec §1.5."""
    c = config
    yield "hidden_size", c.hidden_size, _QUANT_BLOCK
    yield "moe_intermediate_size", c.moe_intermediate_size, _QUANT_BLOCK
    yield "q_lora_rank", c.q_lora_rank, _QUANT_BLOCK
    yield "o_groups * o_lora_rank", c.o_groups * c.o_lora_rank, _QUANT_BLOCK
    yield "num_attention_heads", c.num_attention_heads, c.o_groups
    yield "num_attention_heads * head_dim / o_groups", c.num_attention_heads * c.head_dim // c.o_groups, _QUANT_BLOCK
    yield "head_dim - qk_rope_head_dim", c.nope_head_dim, _STATE_BLOCK
    yield "qk_rope_head_dim", c.qk_rope_head_dim, 2
    yield "index_head_dim", c.index_head_dim, _INDEX_BLOCK


def _relation_problems(config: ModelConfig) -> Iterator[str]:
    c = config
    for name, value, factor in _multiples(c):
        if value <= 0 or value % factor:
            yield f"field {_label(name)} is {value}; right: a positive multiple of {factor}"
    if c.index_head_dim & (c.index_head_dim - 1):
        yield f"field index_head_dim is {c.index_head_dim}; right: a power of two"
    if c.n_shared_experts != 1:
        yield f"field n_shared_experts is {c.n_shared_experts}; right: 1"
    yield from _order_problems(c)
    yield from _draft_problems(c)


def _order_problems(c: ModelConfig) -> Iterator[str]:
    limits = [
        ("num_hash_layers", c.num_hash_layers, "num_hidden_layers", c.num_hidden_layers),
        ("num_experts_per_tok", c.num_experts_per_tok, "n_routed_experts", c.n_routed_experts),
        ("qk_rope_head_dim", c.qk_rope_head_dim, "index_head_dim", c.index_head_dim),
        ("bos_token_id", c.bos_token_id, "vocab_size - 1", c.vocab_size - 1),
        ("eos_token_id", c.eos_token_id, "vocab_size - 1", c.vocab_size - 1),
        ("rope_scaling.beta_slow", c.rope_scaling.beta_slow, "rope_scaling.beta_fast", c.rope_scaling.beta_fast),
    ]
    if c.dspark is not None:
        limits.append(("dspark_noise_token_id", c.dspark.noise_token_id, "vocab_size - 1", c.vocab_size - 1))
    for name, value, other, most in limits:
        if value > most:
            yield f"field {_label(name)} is {value}; right: at most {other} ({most})"
    if c.rope_scaling.factor < 1:
        yield f"field rope_scaling.factor is {c.rope_scaling.factor}; right: 1 or more"


def _draft_problems(c: ModelConfig) -> Iterator[str]:
    if len(c.compress_ratios) != c.num_hidden_layers:
        count = len(c.compress_ratios)
        yield f"field compress_ratios has {count} layer entries; right: {c.num_hidden_layers} (num_hidden_layers)"
    if c.dspark is None:
        if c.draft_stages != c.num_nextn_predict_layers:
            right = f"{c.num_nextn_predict_layers} (num_nextn_predict_layers)"
            yield f"field compress_ratios has {c.draft_stages} draft entries; right: {right}"
        return
    targets = c.dspark.target_layer_ids
    if not c.draft_stages:
        yield "field compress_ratios has 0 draft entries; right: one per DSpark stage"
    if not targets or list(targets) != sorted(set(targets)) or not 0 <= targets[0] <= targets[-1] < c.num_hidden_layers:
        right = f"ascending layer numbers from 0 to {c.num_hidden_layers - 1}"
        yield f"field dspark_target_layer_ids is {list(targets)}; right: {right}"


def _schedule(first: tuple[int, int], pairs: int) -> tuple[int, ...]:
    return (*first, *(4, 128) * pairs, 4)


_FLASH = ModelConfig(
    vocab_size=129280,
    hidden_size=4096,
    moe_intermediate_size=2048,
    num_hidden_layers=43,
    num_hash_layers=3,
    num_nextn_predict_layers=1,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536),
    max_position_embeddings=1048576,
    bos_token_id=0,
    eos_token_id=1,
    compress_ratios=_schedule((0, 0), 20),
    draft_ratios=(0,),
    expert_dtype="fp4",
)
_PRO = replace(
    _FLASH,
    hidden_size=7168,
    moe_intermediate_size=3072,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    n_routed_experts=384,
    routed_scaling_factor=2.5,
    index_topk=1024,
    compress_ratios=_schedule((128, 128), 29),
)
_TINY = replace(
    _FLASH,
    vocab_size=512,
    hidden_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=5,
    num_hash_layers=2,
    num_attention_heads=8,
    head_dim=128,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
    sliding_window=16,
    index_n_heads=32,
    index_topk=8,
    rope_scaling=replace(_FLASH.rope_scaling, original_max_position_embeddings=64),
    compress_ratios=(0, 4, 128, 4, 128),
)
_SMALL = replace(
    _TINY,
    vocab_size=8192,
    hidden_size=1024,
    moe_intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=16,
    head_dim=256,
    q_lora_rank=512,
    o_groups=4,
    o_lora_rank=256,
    n_routed_experts=16,
    num_experts_per_tok=4,
    sliding_window=128,
    index_topk=64,
    rope_scaling=replace(_FLASH.rope_scaling, original_max_position_embeddings=4096),
    compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128),
)
_PRO_TARGETS_NOTE = "dspark_target_layer_ids 58, 59, 60 are by analogy with Flash, not read from the release"

#: Released models and small ones of the same kind; ``tiny`` is the configuration of the golden numbers (spec §1.5).
PRESETS: dict[str, ModelConfig] = {
    "flash": _FLASH,
    "pro": _PRO,
    "flash-base": replace(_FLASH, expert_dtype="fp8"),
    "pro-base": replace(_PRO, expert_dtype="fp8"),
    "flash-0731": replace(_FLASH, draft_ratios=(0, 0, 0), dspark=DSpark(5, 128799, (40, 41, 42), 256)),
    "pro-0813": replace(
        _PRO, draft_ratios=(0, 0, 0), dspark=DSpark(5, 128799, (58, 59, 60), 256), notes=(_PRO_TARGETS_NOTE,)
    ),
    "tiny": _TINY,
    "tiny-chat": _TINY,
    "small": _SMALL,
}
