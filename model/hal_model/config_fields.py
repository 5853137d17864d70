"""The three spellings of a configuration file, read into one set of plain values (spec §1.1, fault B61).

*root*: ``config.json`` of the releases. *reference*: ``inference/config.json`` of the releases. *newer library*: a root
file whose ratio list became ``layer_types`` plus ``compress_rates``, and whose rotary fields moved to
``rope_parameters``. A field that is given twice must have one value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hal.errors import CheckpointError

LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
DSPARK_STAGES = 3

#: field of `ModelConfig` -> name in the reference's file (None: the reference has no such field)
SCALARS: dict[str, str | None] = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_nextn_predict_layers": None,  # n_mtp_layers needs care: DSpark files keep a legacy value here
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit",
    "sliding_window": "window_size",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "max_position_embeddings": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

YARN = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}

DSPARK = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")

# The reference's file leaves these to its caller; every release has the same values (spec §1.1).
_REFERENCE_CONSTANTS = {"max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1}

# This build computes these and nothing else; a file that says otherwise is refused.
_FIXED: dict[str, tuple[str | None, Any]] = {
    "num_key_value_heads": (None, 1),
    "scoring_func": ("score_func", "sqrtsoftplus"),
    "topk_method": (None, "noaux_tc"),
    "norm_topk_prob": (None, True),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "tie_word_embeddings": (None, False),
}
_OPTIONAL_FIXED = ("mlp_bias", "topk_method")

_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}

# Known and of no consequence to inference.
_HARMLESS = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range"),
    *("pad_token_id", "auto_map", "attention_dropout", "output_router_logits", "router_aux_loss_coef", "_name_or_path"),
    *("router_jitter_noise", "scale_fmt", "scale_dtype", "max_batch_size", "max_seq_len"),
}
_STRUCTURED = {
    *("compress_ratios", "layer_types", "compress_rates", "mlp_layer_types", "rope_scaling", "rope_parameters"),
    *("partial_rotary_factor", "quantization_config", "expert_dtype", "n_mtp_layers"),
}


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` of `json.loads`: a field that is given twice is a ValueError, not the last one wins."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"field {key} is given twice")
        seen[key] = value
    return seen


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; `CheckpointError` when it is missing, not JSON, or gives a field twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; right: the {path.name} of a checkpoint folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); right: a readable UTF-8 JSON file") from None
    if text.startswith("version https://git-lfs"):
        raise CheckpointError(f"{path}: is a Git LFS pointer; right: the file that it points to")
    try:
        value = json.loads(text, object_pairs_hook=reject_duplicates)
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); right: a JSON object") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}; right: a JSON object")
    return value


class _Reader:
    """One pass over one file: collects values, problems (each one clause) and notes."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.is_reference = "dim" in data and "model_type" not in data
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def bad(self, field: str, value: Any, right: str) -> None:
        self.problems.append(f"field {field} is {json.dumps(value, default=str)}; right: {right}")

    def missing(self, field: str, right: str) -> None:
        self.problems.append(f"field {field} is missing; right: {right}")

    def unknown(self, fields: Iterable[str]) -> None:
        self.notes += [f"field {field} is not known to this build and not used" for field in fields]

    def one_of(self, found: list[tuple[str, Any]]) -> tuple[bool, Any]:
        """(present, value) of a field spelled in several places, which must agree."""
        found = [(name, value) for name, value in found if value is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                self.bad(name, value, f"the same as {found[0][0]} ({json.dumps(found[0][1], default=str)})")
        return bool(found), found[0][1] if found else None


def read_fields(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values by field of `ModelConfig` (nested ones as plain dicts) and notes about what was not used.

    Raises `CheckpointError` naming every missing, contradictory or foreign field; ranges are not judged here.
    """
    reader = _Reader(data)
    _check_model(reader, source)
    _read_scalars(reader)
    _read_hash_layers(reader)
    _read_yarn(reader)
    _read_dspark(reader)
    _read_ratios(reader)
    _read_quantization(reader)
    _check_fixed(reader)
    _note_unknown(reader)
    raise_problems(source, reader.problems)
    return reader.values, tuple(reader.notes)


def raise_problems(source: str, problems: list[str]) -> None:
    """Raise one `CheckpointError` for all ``problems`` of the file ``source`` (the first ten, then a count)."""
    if problems:
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{source}: " + "; ".join(problems[:10]) + rest)


def _check_model(reader: _Reader, source: str) -> None:
    data = reader.data
    architectures = data.get("architectures") or []
    named = [str(data.get("model_type", ""))] + [str(a) for a in architectures if isinstance(architectures, list)]
    for name in named:
        if name.lower().replace("_", "").startswith("deepseekv41"):
            field = "model_type" if name == data.get("model_type") else "architectures"
            raise CheckpointError(
                f"{source}: field {field} is {name!r}: DeepSeek V4.1 is another architecture, which this build "
                f"does not run; right: deepseek_v4"
            )
    if reader.is_reference:
        return
    if data.get("model_type") is None:
        reader.missing("model_type", '"deepseek_v4"')
    elif data["model_type"] != "deepseek_v4":
        raise CheckpointError(f"{source}: field model_type is {data['model_type']!r}; right: 'deepseek_v4'")
    if architectures and architectures != ["DeepseekV4ForCausalLM"]:
        reader.bad("architectures", architectures, '["DeepseekV4ForCausalLM"]')


def _read_scalars(reader: _Reader) -> None:
    data = reader.data
    for field, reference in SCALARS.items():
        names = [field] if reference in (None, field) else [field, str(reference)]
        found = [(name, data.get(name)) for name in names]
        if field == "qk_rope_head_dim" and "partial_rotary_factor" in data:
            found.append(("partial_rotary_factor * head_dim", _rotary_width(data)))
        if field in ("rope_theta", "compress_rope_theta"):
            found += _nested_theta(data, field)
        present, value = reader.one_of(found)
        if present:
            reader.values[field] = value
        elif reader.is_reference and field in _REFERENCE_CONSTANTS:
            value = reader.values[field] = _REFERENCE_CONSTANTS[field]
            reader.notes.append(f"{field} is not in this spelling: {value} taken, as in every release")
        elif field not in ("num_hash_layers", "num_nextn_predict_layers"):
            reader.missing(field, f"its value, spelled {' or '.join(names)}")


def _rotary_width(data: Mapping[str, Any]) -> Any:
    factor, head_dim = data["partial_rotary_factor"], data.get("head_dim")
    if isinstance(factor, int | float) and isinstance(head_dim, int):
        return round(factor * head_dim)
    return factor


def _nested_theta(data: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    part = "main" if field == "rope_theta" else "compress"
    parameters = data.get("rope_parameters")
    nested = parameters.get(part) if isinstance(parameters, dict) else None
    return [(f"rope_parameters.{part}.rope_theta", nested.get("rope_theta"))] if isinstance(nested, dict) else []


def _read_hash_layers(reader: _Reader) -> None:
    found = [("num_hash_layers", reader.values.get("num_hash_layers"))]
    kinds = reader.data.get("mlp_layer_types")
    if kinds is not None:
        count = kinds.count("hash_moe") if isinstance(kinds, list) else -1
        if count < 0 or kinds != ["hash_moe"] * count + ["moe"] * (len(kinds) - count):
            reader.bad("mlp_layer_types", kinds, "a list of hash_moe entries followed by moe entries")
            return
        if len(kinds) != reader.values.get("num_hidden_layers"):
            reader.bad("mlp_layer_types", f"{len(kinds)} entries", "num_hidden_layers entries")
        found.append(("mlp_layer_types (count of hash_moe)", count))
    present, value = reader.one_of(found)
    if present:
        reader.values["num_hash_layers"] = value
    else:
        reader.missing("num_hash_layers", "its value, spelled num_hash_layers, n_hash_layers or mlp_layer_types")


def _yarn_sources(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    sources = []
    if isinstance(scaling := data.get("rope_scaling"), dict):
        sources.append(("rope_scaling", scaling))
    if isinstance(parameters := data.get("rope_parameters"), dict):
        nested = parameters.get("compress", parameters)
        sources.append(("rope_parameters.compress" if "compress" in parameters else "rope_parameters", nested))
    return [(name, source) for name, source in sources if isinstance(source, dict)]


def _read_yarn(reader: _Reader) -> None:
    sources = _yarn_sources(reader.data)
    values = {}
    for field, reference in YARN.items():
        found = [(f"{name}.{field}", source.get(field)) for name, source in sources]
        present, value = reader.one_of([*found, (reference, reader.data.get(reference))])
        if present:
            values[field] = value
        else:
            reader.missing(f"rope_scaling.{field}", f"its value, spelled rope_scaling.{field} or {reference}")
    for name, source in sources:
        _check_yarn_source(reader, name, source)
    reader.values["rope_scaling"] = values


def _check_yarn_source(reader: _Reader, name: str, source: Mapping[str, Any]) -> None:
    kinds = {key: source[key] for key in ("type", "rope_type") if key in source}
    if not kinds:
        reader.missing(f"{name}.type", '"yarn"')
    for key, value in kinds.items():
        if value != "yarn":
            reader.bad(f"{name}.{key}", value, '"yarn"')
    if source.get("attention_factor", 1.0) != 1.0:
        reader.bad(f"{name}.attention_factor", source["attention_factor"], "1.0 (the model scales no cosine or sine)")
    known = {*YARN, "type", "rope_type", "attention_factor", "rope_theta", "partial_rotary_factor"}
    reader.unknown(f"{name}.{key}" for key in source if key not in known)


def _read_dspark(reader: _Reader) -> None:
    given = [name for name in DSPARK if reader.data.get(name) is not None]
    reader.values["dspark"] = None
    if not given:
        return
    for name in DSPARK:
        if name not in given:
            reader.missing(name, f"its value, since {given[0]} is given")
    values: dict[str, Any] = {name.removeprefix("dspark_"): reader.data[name] for name in given}
    if isinstance(values.get("target_layer_ids"), list):
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
    reader.values["dspark"] = values


def _read_ratios(reader: _Reader) -> None:
    stages = _read_stages(reader)
    layers = reader.values.get("num_hidden_layers")
    ratios = _ratio_list(reader)
    for field, value in (("num_hidden_layers", layers), ("n_mtp_layers (num_nextn_predict_layers)", stages)):
        if value is not None and not _is_count(value):
            reader.bad(field, value, "an integer 0 or more")
    if ratios is None or not _is_count(layers) or not _is_count(stages):
        return
    if len(ratios) not in (layers, layers + stages):
        right = f"{layers} (num_hidden_layers) or {layers + stages} (with {stages} draft stages)"
        reader.bad("compress_ratios", f"{len(ratios)} entries", right)
        return
    if stages and len(ratios) == layers:
        reader.notes.append(f"compress_ratios has no entry for the {stages} draft stages: 0 (no compression) taken")
        ratios = ratios + (0,) * stages
    reader.values["compress_ratios"], reader.values["draft_ratios"] = ratios[:layers], ratios[layers:]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _read_stages(reader: _Reader) -> Any:
    """Draft stages of the file; DSpark files keep a legacy 1 in num_nextn_predict_layers (spec §1.4)."""
    given, data = reader.values.get("num_nextn_predict_layers"), reader.data
    if reader.values["dspark"] is not None:
        reader.values["num_nextn_predict_layers"] = 1 if given is None else given
        return data.get("n_mtp_layers", DSPARK_STAGES)
    _, stages = reader.one_of([("num_nextn_predict_layers", given), ("n_mtp_layers", data.get("n_mtp_layers"))])
    if stages is None and reader.is_reference:
        stages = 1
    if stages is None:
        reader.missing("num_nextn_predict_layers", "the number of draft blocks, 0 for none")
    else:
        reader.values["num_nextn_predict_layers"] = stages
    return stages


def _ratio_list(reader: _Reader) -> tuple[Any, ...] | None:
    """Ratios from either spelling; 1 and 0 both mean no compression."""
    ratios, types = reader.data.get("compress_ratios"), reader.data.get("layer_types")
    if ratios is not None and not isinstance(ratios, list):
        reader.bad("compress_ratios", ratios, "a list of 0, 4 or 128 per layer")
        return None
    named = _ratios_of_types(reader, types) if types is not None else None
    if ratios is None:
        if types is None:
            reader.missing("compress_ratios", "a list with a ratio per layer (or layer_types with compress_rates)")
        return named
    plain = tuple(0 if r == 1 and type(r) is int else r for r in ratios)
    if named is not None and named != plain[: len(named)]:
        reader.bad("layer_types", types, "the same layers as compress_ratios")
    return plain


def _ratios_of_types(reader: _Reader, types: Any) -> tuple[int, ...] | None:
    rates = reader.data.get("compress_rates")
    expected = {name: ratio for name, ratio in LAYER_TYPES.items() if ratio}
    given = {k: v for k, v in rates.items() if k in expected} if isinstance(rates, dict) else None
    if rates is None:
        reader.missing("compress_rates", f"{json.dumps(expected)}, since layer_types is given")
    elif given != expected:
        reader.bad("compress_rates", rates, json.dumps(expected))
    unknown = [t for t in types if t not in LAYER_TYPES] if isinstance(types, list) else [types]
    if unknown:
        reader.bad("layer_types", unknown[0], "a list of " + ", ".join(LAYER_TYPES))
        return None
    return tuple(LAYER_TYPES[t] for t in types)


def _read_quantization(reader: _Reader) -> None:
    quantization = reader.data.get("quantization_config")
    nested = None
    if isinstance(quantization, dict):
        nested = quantization.get("expert_dtype")
        for key, right in _QUANTIZATION.items():
            if key not in quantization:
                reader.missing(f"quantization_config.{key}", json.dumps(right))
            elif quantization[key] != right:
                reader.bad(f"quantization_config.{key}", quantization[key], json.dumps(right))
        extra = sorted(quantization.keys() - _QUANTIZATION.keys() - {"expert_dtype"})
        reader.unknown(f"quantization_config.{key}" for key in extra)
    elif quantization is not None:
        reader.bad("quantization_config", quantization, f"an object such as {json.dumps(_QUANTIZATION)}")
    places = [("expert_dtype", reader.data.get("expert_dtype")), ("quantization_config.expert_dtype", nested)]
    reader.values["expert_dtype"] = reader.one_of(places)[1]


def _check_fixed(reader: _Reader) -> None:
    for field, (reference, right) in _FIXED.items():
        names = [field, reference] if reference else [field]
        given = [name for name in names if name in reader.data]
        for name in given:
            if type(reader.data[name]) is not type(right) or reader.data[name] != right:
                reader.bad(name, reader.data[name], f"{json.dumps(right)} (this build computes nothing else)")
        if not given and not reader.is_reference and field not in _OPTIONAL_FIXED:
            reader.notes.append(f"field {field} is missing: this build computes {json.dumps(right)}")


def _note_unknown(reader: _Reader) -> None:
    names = {*SCALARS, *filter(None, SCALARS.values()), *YARN.values(), *DSPARK, *_FIXED, "score_func"}
    known = names | _HARMLESS | _STRUCTURED
    reader.unknown(key for key in reader.data if key not in known)
