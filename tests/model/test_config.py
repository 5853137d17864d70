"""Configuration files: three spellings, one model; every wrong field is named with its value and what is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hal.errors import CheckpointError
from hal_model.config import PRESETS, ModelConfig

TINY = PRESETS["tiny"]
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def root(preset: str = "tiny", **changes: Any) -> dict[str, Any]:
    """The root spelling of a preset with fields changed; a change to None removes the field."""
    data = PRESETS[preset].to_dict() | {"quantization_config": dict(QUANTIZATION)} | changes
    return {name: value for name, value in data.items() if value is not None}


def reference(preset: str = "tiny", **changes: Any) -> dict[str, Any]:
    """The spelling of the release's inference/config.json, typed in by hand from the specification's table."""
    c = PRESETS[preset]
    data: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "dim": c.hidden_size,
        "moe_inter_dim": c.moe_intermediate_size,
        "n_layers": c.num_hidden_layers,
        "n_hash_layers": c.num_hash_layers,
        "n_heads": c.num_attention_heads,
        "head_dim": c.head_dim,
        "rope_head_dim": c.qk_rope_head_dim,
        "q_lora_rank": c.q_lora_rank,
        "o_groups": c.o_groups,
        "o_lora_rank": c.o_lora_rank,
        "n_routed_experts": c.n_routed_experts,
        "n_shared_experts": 1,
        "n_activated_experts": c.num_experts_per_tok,
        "route_scale": c.routed_scaling_factor,
        "score_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "window_size": c.sliding_window,
        "index_n_heads": c.index_n_heads,
        "index_head_dim": c.index_head_dim,
        "index_topk": c.index_topk,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_seq_len": c.rope_scaling.original_max_position_embeddings,
        "compress_ratios": [*c.compress_ratios, *c.draft_ratios],
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        **changes,
    }
    return {name: value for name, value in data.items() if value is not None}


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(data, "some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert "\n" not in message
    assert "right: " in message
    return message


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_survives_its_own_file(preset: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[preset].to_dict()))
    loaded = ModelConfig.from_dir(tmp_path)
    assert loaded == PRESETS[preset]
    assert loaded.notes == ()
    assert loaded.source == str(tmp_path / "config.json")


def test_released_layer_kinds_are_those_of_the_specification() -> None:
    flash, pro = PRESETS["flash"].compress_ratios, PRESETS["pro"].compress_ratios
    assert [i for i, r in enumerate(flash) if r == 4] == list(range(2, 43, 2))
    assert [i for i, r in enumerate(flash) if r == 128] == list(range(3, 42, 2))
    assert [i for i, r in enumerate(pro) if r == 4] == list(range(2, 61, 2))
    assert [i for i, r in enumerate(pro) if r == 128] == [0, *range(1, 60, 2)]
    assert {len(PRESETS[name].draft_ratios) for name in ("flash", "pro", "tiny")} == {1}
    assert {len(PRESETS[name].draft_ratios) for name in ("flash-0731", "pro-0813")} == {3}


def test_the_small_preset_has_every_layer_kind() -> None:
    assert set(PRESETS["small"].compress_ratios) == {0, 4, 128}
    assert 0 < PRESETS["small"].num_hash_layers < PRESETS["small"].num_hidden_layers


@pytest.mark.parametrize("preset", ["tiny", "flash", "pro"])
def test_the_reference_spelling_is_the_same_model(preset: str) -> None:
    config = ModelConfig.from_dict(reference(preset))
    assert config == PRESETS[preset]
    assert [note.split()[0] for note in config.notes] == ["max_position_embeddings", "bos_token_id", "eos_token_id"]


def test_the_reference_may_name_its_draft_blocks_or_leave_the_default_of_one() -> None:
    assert ModelConfig.from_dict(reference(n_mtp_layers=1)) == ModelConfig.from_dict(reference())


def test_dspark_keeps_its_legacy_count_and_has_three_stages() -> None:
    fields = {name: value for name, value in PRESETS["flash-0731"].to_dict().items() if name.startswith("dspark_")}
    assert fields == {
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    by_reference = ModelConfig.from_dict(reference("flash-0731", n_mtp_layers=3, **fields))
    by_root = ModelConfig.from_dict(root("flash-0731", n_mtp_layers=None))
    assert by_reference == by_root == PRESETS["flash-0731"]
    assert (by_root.num_nextn_predict_layers, by_root.draft_stages) == (1, 3)


def test_the_newer_library_writes_a_file_that_is_the_same_model(tmp_path: Path) -> None:
    """B61: the real library renames the ratio list and nests the rotary fields."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    DeepseekV4Config(**root(topk_method=None)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in saved
    assert "num_hash_layers" not in saved
    assert {"layer_types", "compress_rates", "mlp_layer_types", "rope_parameters"} <= saved.keys()
    config = ModelConfig.from_dir(tmp_path)
    assert config == TINY
    assert config.notes == ("compress_ratios has no entry for the 1 draft stages: 0 (no compression) taken",)


def test_the_extra_ratio_goes_to_the_draft_block() -> None:
    """B61, B30: 44 entries for 43 layers; the draft entry is the last one on both schedules."""
    assert ModelConfig.from_dict(root("flash")).draft_ratios == (0,)
    for ratios in ([0, 0, 4, 128, 4, 0], [128, 128, 4, 128, 4, 0]):
        config = ModelConfig.from_dict(root(compress_ratios=ratios))
        assert config.compress_ratios == tuple(ratios[:5])
        assert config.draft_ratios == (0,)


def test_one_means_no_compression() -> None:
    assert ModelConfig.from_dict(root(compress_ratios=[1, 4, 128, 4, 128, 1])) == TINY


def test_a_swiglu_limit_of_zero_is_accepted_and_means_no_clamp() -> None:
    assert ModelConfig.from_dict(root(swiglu_limit=0)).swiglu_limit == 0.0


@pytest.mark.parametrize("count", [42, 45])
def test_a_ratio_list_of_another_length_is_refused(count: int) -> None:
    message = refusal(root("flash", compress_ratios=[0] * count))
    assert f'compress_ratios is "{count} entries"; right: 43 (num_hidden_layers) or 44 (with 1 draft stages)' in message


REQUIRED = sorted(
    TINY.to_dict().keys()
    - {"architectures", "attention_dropout", "expert_dtype"}
    - {"num_key_value_heads", "scoring_func", "topk_method", "norm_topk_prob", "hidden_act", "attention_bias"}
    - {"tie_word_embeddings"}
)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str) -> None:
    assert f"field {field}" in (message := refusal(root() | {field: None}))
    assert "is missing" in message


@pytest.mark.parametrize("field", REQUIRED)
def test_a_renamed_field_is_named_as_missing(field: str) -> None:
    data = root()
    data[field + "_v2"] = data.pop(field)
    assert f"field {field}" in refusal(data)


OPTIONAL_IN_REFERENCE = {"dtype", "scale_fmt", "expert_dtype", "score_func"}


@pytest.mark.parametrize("field", sorted(reference().keys() - OPTIONAL_IN_REFERENCE - {"dim"}))
def test_a_missing_field_of_the_reference_spelling_is_named(field: str) -> None:
    assert field in (message := refusal(reference() | {field: None}))
    assert "is missing" in message


@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "type"])
def test_a_missing_rotary_field_is_named(field: str) -> None:
    scaling = {name: value for name, value in TINY.to_dict()["rope_scaling"].items() if name != field}
    assert f"field rope_scaling.{field} is missing" in refusal(root(rope_scaling=scaling))


@pytest.mark.parametrize("field", ["block_size", "noise_token_id", "target_layer_ids", "markov_rank"])
def test_a_missing_dspark_field_is_named(field: str) -> None:
    assert f"field dspark_{field} is missing" in refusal(root("flash-0731", **{"dspark_" + field: None}))


NUMBERS = [name for name in REQUIRED if isinstance(getattr(TINY, name, None), int | float)]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [-1, "7", True, [1], float("nan")])
def test_a_number_of_a_wrong_kind_or_sign_is_named_with_its_value(field: str, value: Any) -> None:
    message = refusal(root(**{field: value}))
    assert field in message
    assert repr(value) in message or json.dumps(value) in message


@pytest.mark.parametrize("field", sorted(name for name in NUMBERS if isinstance(getattr(TINY, name), int)))
def test_a_fraction_for_a_count_is_refused(field: str) -> None:
    assert "2.5" in (message := refusal(root() | {field: 2.5}))
    assert f"{field}" in message


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"hidden_size": 200}, "hidden_size (or dim) is 200; right: a positive multiple of 128"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size (or moe_inter_dim) is 64"),
        ({"q_lora_rank": 96}, "q_lora_rank is 96; right: a positive multiple of 128"),
        ({"o_lora_rank": 96}, "o_groups * o_lora_rank is 192; right: a positive multiple of 128"),
        ({"o_groups": 3}, "num_attention_heads (or n_heads) is 8; right: a positive multiple of 3"),
        ({"head_dim": 160}, "head_dim - qk_rope_head_dim is 96; right: a positive multiple of 64"),
        ({"head_dim": 64}, "head_dim - qk_rope_head_dim is 0"),
        ({"index_head_dim": 96}, "index_head_dim is 96; right: a power of two"),
        ({"index_head_dim": 32}, "qk_rope_head_dim (or rope_head_dim) is 64; right: at most index_head_dim (32)"),
        ({"num_hash_layers": 6}, "num_hash_layers (or n_hash_layers) is 6; right: at most num_hidden_layers (5)"),
        ({"num_experts_per_tok": 9}, "is 9; right: at most n_routed_experts (8)"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; right: 1"),
        ({"eos_token_id": 512}, "eos_token_id is 512; right: at most vocab_size - 1 (511)"),
        ({"compress_ratios": [0, 7, 128, 4, 128, 0]}, "compress_ratios[1] is 7; right: one of 0, 4, 128"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 8]}, "compress_ratios (draft entries)[0] is 8"),
        ({"compress_ratios": "0,4"}, 'compress_ratios is "0,4"; right: a list'),
        ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"; right: "sqrtsoftplus"'),
        ({"norm_topk_prob": False}, "norm_topk_prob is false; right: true"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true; right: false"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; right: 1"),
        ({"expert_dtype": "int4"}, "expert_dtype is 'int4'; right: 'fp4', 'fp8' or no such field"),
        ({"dim": 512}, "dim is 512; right: the same as hidden_size (256)"),
        ({"n_mtp_layers": 2}, "n_mtp_layers is 2; right: the same as num_nextn_predict_layers (1)"),
        ({"quantization_config": QUANTIZATION | {"fmt": "e5m2"}}, 'quantization_config.fmt is "e5m2"; right: "e4m3"'),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8"'),
        ({"rope_scaling": TINY.to_dict()["rope_scaling"] | {"type": "linear"}}, 'rope_scaling.type is "linear"'),
        ({"rope_scaling": TINY.to_dict()["rope_scaling"] | {"factor": 0.5}}, "rope_scaling.factor is 0.5; right: 1 or"),
        ({"architectures": ["LlamaForCausalLM"]}, 'architectures is ["LlamaForCausalLM"]'),
    ],
)
def test_a_contradiction_or_foreign_value_is_named(changes: dict[str, Any], clause: str) -> None:
    assert clause in refusal(root(**changes))


@pytest.mark.parametrize("targets", [[], [42, 41], [40, 43], [-1], "40", [40.5]])
def test_dspark_targets_must_be_layers(targets: Any) -> None:
    assert "dspark_target_layer_ids" in refusal(root("flash-0731", dspark_target_layer_ids=targets))


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types is"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 5}, 'layer_types is "full_attention"'),
        ({"compress_ratios": None, "layer_types": ["sliding_attention"] * 5}, "compress_rates is missing"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "mlp_layer_types is"),
        ({"mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"]}, "mlp_layer_types (count of hash_moe) is 1"),
        ({"rope_parameters": {"main": {"rope_theta": 5.0}}}, "rope_parameters.main.rope_theta is 5.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor * head_dim is 32"),
    ],
)
def test_two_spellings_in_one_file_must_agree(changes: dict[str, Any], clause: str) -> None:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    if clause != "compress_rates is missing":
        changes = {"compress_rates": rates, **changes}
    assert clause in refusal(root(**changes))


def test_a_rate_map_with_other_rates_is_refused() -> None:
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128}
    kinds = ["sliding_attention"] * 5
    assert "field compress_rates is" in refusal(root(compress_ratios=None, layer_types=kinds, compress_rates=rates))


@pytest.mark.parametrize("data", [{"model_type": "deepseek_v41"}, {"architectures": ["DeepseekV41ForCausalLM"]}])
def test_the_next_architecture_is_refused_by_name(data: dict[str, Any]) -> None:
    message = refusal(root() | data)
    assert "DeepSeek V4.1" in message
    assert next(iter(data)) in message


def test_another_model_is_refused_by_name() -> None:
    assert "field model_type is 'llama'; right: 'deepseek_v4'" in refusal({"model_type": "llama"})


def test_several_problems_come_in_one_message_with_a_count_of_the_rest() -> None:
    message = refusal({"model_type": "deepseek_v4"})
    assert message.count("is missing") == 10
    assert "; and " in message


def test_unknown_fields_are_noted_and_harmless_ones_are_not() -> None:
    config = ModelConfig.from_dict(root(engram_layer_ids=[1], use_cache=True, torch_dtype="bfloat16"))
    assert config.notes == ("field engram_layer_ids is not known to this build and not used",)


def test_a_constant_that_the_file_leaves_out_is_noted() -> None:
    notes = ModelConfig.from_dict(root(scoring_func=None)).notes
    assert notes == ('field scoring_func is missing: this build computes "sqrtsoftplus"',)


def test_a_configuration_made_by_hand_is_checked_too() -> None:
    with pytest.raises(CheckpointError, match="index_topk is 0; right: an integer above 0"):
        replace(TINY, index_topk=0)


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[]", "a JSON list"),
        ('{"a": 1, "a": 2}', "field a is given twice"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(text: str | bytes | None, clause: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert clause in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
