"""The tensor list computed from a configuration equals what was published, to the byte (spec §4.2)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from hal.errors import UsageError
from hal_model.config import PRESETS
from hal_model.inventory import TensorSpec, tensors


def totals(preset: str, *formats: Any, **options: Any) -> tuple[int, int]:
    count = nbytes = 0
    for spec in tensors(PRESETS[preset], *formats, **options):
        count, nbytes = count + 1, nbytes + spec.nbytes
    return count, nbytes


@pytest.mark.parametrize(
    ("preset", "backbone", "draft"),
    [
        ("flash", (67612, 156_015_698_140), (1575, 3_593_787_756)),
        ("flash-0731", (67612, 156_015_698_140), (4705, 10_862_838_300)),
        ("pro", (142773, 850_748_205_004), (2343, 13_956_587_692)),
    ],
)
def test_published_totals(preset: str, backbone: tuple[int, int], draft: tuple[int, int]) -> None:
    published = {
        "flash": (69187, 159_609_485_896),
        "flash-0731": (72317, 166_878_536_440),
        "pro": (145116, 864_704_792_696),
    }
    assert totals(preset, draft=False) == backbone
    assert totals(preset, backbone=False) == draft
    assert (backbone[0] + draft[0], backbone[1] + draft[1]) == published[preset]


def test_base_with_float_scales_has_the_reported_size() -> None:
    assert totals("flash-base", "fp8", scales="F32")[1] == pytest.approx(292.55e9, rel=1e-4)


def test_the_golden_model_has_312_tensors() -> None:
    for formats in (("f32", "f32"), ("bf16", "bf16")):
        assert totals("tiny", *formats)[0] == 312


@cache
def listing(preset: str) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in tensors(PRESETS[preset])}


@pytest.mark.parametrize(
    ("preset", "name", "dtype", "shape"),
    [
        ("flash", "embed.weight", "BF16", (129280, 4096)),
        ("flash", "hc_head_fn", "F32", (4, 16384)),
        ("flash", "layers.0.hc_attn_fn", "F32", (24, 16384)),
        ("flash", "layers.2.ffn.gate.tid2eid", "I64", (129280, 6)),
        ("flash", "layers.3.ffn.gate.bias", "F32", (256,)),
        ("flash", "layers.5.attn.wo_a.scale", "F8_E8M0", (64, 32)),
        ("flash", "layers.2.attn.compressor.ape", "F32", (4, 1024)),
        ("flash", "layers.3.attn.compressor.ape", "F32", (128, 512)),
        ("flash", "layers.2.attn.indexer.wq_b.scale", "F8_E8M0", (64, 8)),
        ("flash", "layers.2.attn.indexer.compressor.wgate.weight", "BF16", (256, 4096)),
        ("flash", "layers.9.ffn.experts.255.w2.weight", "I8", (4096, 1024)),
        ("flash", "layers.9.ffn.experts.255.w2.scale", "F8_E8M0", (4096, 64)),
        ("flash", "mtp.0.h_proj.scale", "F8_E8M0", (32, 32)),
        ("flash-0731", "mtp.0.main_proj.weight", "F8_E4M3", (4096, 12288)),
        ("flash-0731", "mtp.2.markov_head.markov_w2.weight", "BF16", (129280, 256)),
        ("flash-0731", "mtp.2.confidence_head.proj.weight", "BF16", (1, 4352)),
        ("pro", "layers.0.attn.compressor.wkv.weight", "BF16", (512, 7168)),
        ("pro", "layers.9.ffn.experts.383.w1.weight", "I8", (3072, 3584)),
        ("pro", "layers.9.ffn.shared_experts.w2.scale", "F8_E8M0", (56, 24)),
        ("pro", "layers.2.attn.indexer.wq_b.scale", "F8_E8M0", (64, 12)),
    ],
)
def test_shapes_of_the_published_table(preset: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert listing(preset)[name] == TensorSpec(name, dtype, shape)


def test_names_that_a_release_does_not_have() -> None:
    flash = listing("flash")
    assert "layers.2.ffn.gate.bias" not in flash
    assert "layers.3.ffn.gate.tid2eid" not in flash
    assert not any(name.startswith("layers.0.attn.compressor") for name in flash)
    dspark = {spec.name for spec in tensors(PRESETS["flash-0731"], backbone=False)}
    assert not any(part in name for name in dspark for part in ("e_proj", "h_proj", "enorm", "hnorm", "tid2eid"))


@pytest.mark.parametrize("preset", ["tiny", "small", "flash-0731"])
def test_names_are_distinct(preset: str) -> None:
    names = [spec.name for spec in tensors(PRESETS[preset])]
    assert len(set(names)) == len(names)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="experts='int4'"):
        totals("tiny", "int4")
