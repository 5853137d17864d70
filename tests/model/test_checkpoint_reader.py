"""Damaged, incomplete and foreign checkpoints: each fault is named by file and tensor; sound ones load uncopied."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hal.errors import CheckpointError
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS, DSpark, ModelConfig

TINY = PRESETS["tiny"]
INDEX = "model.safetensors.index.json"
WQ_A = "layers.0.attn.wq_a.weight"
W1 = "layers.3.ffn.experts.5.w1.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pristine") / "tiny"
    init_checkpoint(TINY, out, shard_bytes=3 << 20)
    return out


@pytest.fixture(scope="module")
def tensors(pristine: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(pristine.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture
def sharded(pristine: Path, tmp_path: Path) -> Path:
    """A private copy of a checkpoint of four shards."""
    return shutil.copytree(pristine, tmp_path / "tiny")


def single(folder: Path, tensors: Tensors, **changes: Tensor | None) -> Checkpoint:
    """One model.safetensors written by the safetensors library, with tensors replaced (None: removed)."""
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return Checkpoint.open(folder)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shard_of(folder: Path, name: str) -> Path:
    return folder / str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


# -- sound checkpoints


def test_a_sound_checkpoint_verifies_and_loads_what_the_library_loads(pristine: Path, tensors: Tensors) -> None:
    checkpoint = Checkpoint.open(pristine)
    report = checkpoint.verify(TINY)
    assert (report.tensors, report.nbytes) == (508, 9_918_836)
    assert (report.experts, report.dense, report.scales) == (("fp4",), ("fp8",), ("F8_E8M0",))
    assert (report.draft, report.unused, report.notes) == ("mtp", (), ())
    assert set(checkpoint.names) == set(tensors)
    for name in checkpoint.names:
        loaded = checkpoint.load(name)
        assert loaded.dtype == tensors[name].dtype == checkpoint.spec(name).torch_dtype
        assert torch.equal(loaded.view(torch.uint8), tensors[name].view(torch.uint8))


def test_loading_copies_nothing_and_never_writes_to_the_file(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    before = shard_of(sharded, WQ_A).read_bytes()
    first, second = checkpoint.load(WQ_A), checkpoint.load(WQ_A)
    assert first.data_ptr() == second.data_ptr()
    first.view(torch.uint8).zero_()
    checkpoint.close()
    assert shard_of(sharded, WQ_A).read_bytes() == before
    assert torch.equal(second.view(torch.uint8), torch.zeros_like(second.view(torch.uint8)))


def test_unaligned_data_loads_right(tmp_path: Path) -> None:
    file = tmp_path / "odd.safetensors"
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        "c": {"dtype": "F32", "shape": [0, 4], "data_offsets": [11, 11]},
    }
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\1\2\3" + struct.pack("<2f", 1.5, -2.0))
    checkpoint = Checkpoint.open(file)
    assert checkpoint.load("b").tolist() == [1.5, -2.0]
    assert checkpoint.load("c").shape == (0, 4)


def test_a_single_file_is_enough(tmp_path: Path, tensors: Tensors) -> None:
    assert single(tmp_path, tensors).verify(TINY).tensors == 508
    assert Checkpoint.open(tmp_path / "model.safetensors").verify(TINY).tensors == 508


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_unquantised_tensor_is_accepted_among_quantised_ones(
    dtype: torch.dtype, tmp_path: Path, tensors: Tensors
) -> None:
    plain = {WQ_A: torch.zeros(128, 256, dtype=dtype), WQ_A.replace("weight", "scale"): None}
    report = single(tmp_path, tensors, **plain).verify(TINY)
    assert len(report.dense) == 2
    assert "fp8" in report.dense


def test_float_scales_are_accepted(tmp_path: Path, tensors: Tensors) -> None:
    scales = {name: tensor.float() for name, tensor in tensors.items() if name.endswith(".scale")}
    checkpoint = single(tmp_path, tensors, **scales)
    assert checkpoint.verify(TINY).scales == ("F32",)
    checkpoint.check_values(TINY)


def test_a_checkpoint_without_its_draft_is_accepted_and_says_so(tmp_path: Path, tensors: Tensors) -> None:
    without = {name: None for name in tensors if name.startswith("mtp.")}
    report = single(tmp_path, tensors, **without).verify(TINY)
    assert report.draft == "absent"
    assert "no speculative decoding" in report.notes[-1]


def test_dspark_stages_are_recognised_and_reported_as_not_used(tmp_path: Path) -> None:
    dspark = DSpark(block_size=5, noise_token_id=511, target_layer_ids=(2, 3, 4), markov_rank=256)
    config = replace(TINY, draft_ratios=(0, 0, 0), dspark=dspark)
    init_checkpoint(config, tmp_path / "tiny")
    report = Checkpoint.open(tmp_path / "tiny").verify(ModelConfig.from_dir(tmp_path / "tiny"))
    assert (report.draft, report.unused) == ("dspark", ("mtp.0", "mtp.1", "mtp.2"))
    assert report.notes == ("DSpark stages mtp.0, mtp.1, mtp.2 are recognised and not used by this build",)


def test_tensors_decide_when_the_configuration_declares_another_format(pristine: Path) -> None:
    report = Checkpoint.open(pristine).verify(replace(TINY, expert_dtype="fp8"))
    assert report.notes == ("expert_dtype says fp8, the tensors are fp4: the tensors decide",)


# -- names


def test_a_renamed_checkpoint_is_the_same_checkpoint(tmp_path: Path, tensors: Tensors) -> None:
    renamed = {f"model.{name}".replace(".attn.", ".self_attn."): tensor for name, tensor in tensors.items()}
    renamed["mtp.0.embed_tokens.weight"] = torch.zeros(1)
    save_file(renamed, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    report = checkpoint.verify(TINY)
    assert report.tensors == 508
    assert report.notes == ("tensor mtp.0.embed_tokens.weight is a draft copy of a shared tensor and is not used",)
    assert torch.equal(checkpoint.load(WQ_A).view(torch.uint8), tensors[WQ_A].view(torch.uint8))


def test_two_tensors_of_one_meaning_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    message = refusal(lambda: single(tmp_path, tensors, **{"model.norm.weight": torch.ones(256)}))
    assert "norm.weight and " in message
    assert "both mean norm.weight; right: one of them" in message


# -- damaged files


def test_a_cut_shard_is_named_with_both_sizes(sharded: Path) -> None:
    shard = shard_of(sharded, WQ_A)
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-5])
    message = refusal(lambda: Checkpoint.open(sharded))
    assert f"{shard}: cut: the header says {size} bytes, the file has {size - 5}" in message


@pytest.mark.parametrize("kept", [0, 7, 8, 100])
def test_a_shard_cut_inside_its_header_is_named(kept: int, sharded: Path) -> None:
    shard = shard_of(sharded, WQ_A)
    shard.write_bytes(shard.read_bytes()[:kept])
    message = refusal(lambda: Checkpoint.open(sharded))
    assert f"{shard}: cut" in message
    assert f"the file has {kept} bytes" in message


def test_a_shard_with_bytes_behind_its_end_is_named(sharded: Path) -> None:
    shard = shard_of(sharded, WQ_A)
    shard.write_bytes(shard.read_bytes() + b"\0")
    assert f"{shard}: too long" in refusal(lambda: Checkpoint.open(sharded))


def test_every_missing_shard_is_named_at_once(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[:2]
    for shard in gone:
        shard.unlink()
    message = refusal(lambda: Checkpoint.open(sharded))
    assert all(f"{shard}: no such file" in message for shard in gone)


def test_an_unknown_dtype_is_not_called_damage(sharded: Path) -> None:
    """B65: a dtype that this build does not know says so, and gives no advice to download again."""
    shard = shard_of(sharded, WQ_A)
    edit_header(shard, lambda header: header[WQ_A].update(dtype="F4_E2M1X"))
    message = refusal(lambda: Checkpoint.open(sharded))
    assert f"{shard}: tensor {WQ_A}: dtype F4_E2M1X not known by this build" in message
    assert not any(word in message for word in ("download", "corrupt", "cut", "damaged"))


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"shape": [128, 255]}, f"tensor {WQ_A}: data_offsets span 32768 bytes; right: 32640 for F8_E4M3 [128, 255]"),
        ({"shape": [-1, 256]}, f"tensor {WQ_A}: shape [-1, 256]"),
        ({"data_offsets": [0]}, f"tensor {WQ_A}: shape [128, 256], data_offsets [0]"),
        ({"data_offsets": [1, 32769]}, "of the data; right: "),
    ],
)
def test_a_header_that_contradicts_itself_names_the_tensor(change: dict[str, Any], clause: str, sharded: Path) -> None:
    edit_header(shard_of(sharded, WQ_A), lambda header: header[WQ_A].update(change))
    assert clause in refusal(lambda: Checkpoint.open(sharded))


@pytest.mark.parametrize(
    ("content", "clause"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
        (struct.pack("<Q", 4) + b"nope", "header is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "header is a JSON list"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "tensor a: the header entry is 1"),
    ],
)
def test_a_file_that_is_not_safetensors_is_named(content: bytes, clause: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(lambda: Checkpoint.open(tmp_path))
    assert clause in message
    assert str(tmp_path / "model.safetensors") in message


# -- index and shards


def test_a_tensor_that_the_index_puts_in_another_shard_is_named(sharded: Path) -> None:
    wrong = next(file.name for file in sharded.glob("*.safetensors") if file != shard_of(sharded, WQ_A))
    right = shard_of(sharded, WQ_A).name
    edit_index(sharded, lambda index: index["weight_map"].update({WQ_A: wrong}))
    message = refusal(lambda: Checkpoint.open(sharded))
    assert f"tensor {WQ_A} is not in {wrong}, where the index puts it; it is in {right}" in message


def test_a_tensor_that_no_shard_holds_is_named(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"ghost": shard_of(sharded, WQ_A).name}))
    assert "tensor ghost is not in model-" in refusal(lambda: Checkpoint.open(sharded))


def test_a_tensor_that_the_index_does_not_list_is_named(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].pop(WQ_A))
    assert f"tensor {WQ_A} is in {shard_of(sharded, W1).name[:6]}" in refusal(lambda: Checkpoint.open(sharded))


def test_a_wrong_total_is_named_with_both_values(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["metadata"].update(total_size=7))
    message = refusal(lambda: Checkpoint.open(sharded))
    assert "field metadata.total_size is 7; right: 9918836" in message
    assert INDEX in message


def test_what_cannot_be_compared_or_used_is_noted(sharded: Path) -> None:
    edit_index(sharded, lambda index: index.pop("metadata"))
    (sharded / "stray.safetensors").write_bytes(b"")
    notes = Checkpoint.open(sharded).notes
    assert any("stray.safetensors is not in the index" in note for note in notes)
    assert any("no metadata.total_size" in note for note in notes)


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "weights.bin", 3])
def test_an_index_may_only_name_files_beside_it(file: object, sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({WQ_A: file}))
    assert f"tensor {WQ_A} is mapped to {file!r}" in refusal(lambda: Checkpoint.open(sharded))


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_an_index_without_a_map_is_refused(weight_map: object, sharded: Path) -> None:
    edit_index(sharded, lambda index: index.update(weight_map=weight_map))
    assert "field weight_map is" in refusal(lambda: Checkpoint.open(sharded))


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert "holds 4 safetensors files and no index" in refusal(lambda: Checkpoint.open(sharded))


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'}: no such" in refusal(lambda: Checkpoint.open(tmp_path / "nowhere"))


# -- tensors against the configuration


def test_a_missing_tensor_is_named(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint = single(tmp_path, tensors, **{"layers.1.attn.compressor.ape": None})
    message = refusal(lambda: checkpoint.verify(TINY))
    assert "tensor layers.1.attn.compressor.ape is missing; right: F32 [4, 256]" in message
    assert "is missing" in refusal(lambda: checkpoint.load("layers.1.attn.compressor.ape"))


def test_a_missing_draft_tensor_is_named_when_the_rest_of_the_draft_is_there(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint = single(tmp_path, tensors, **{"mtp.0.enorm.weight": None})
    assert "tensor mtp.0.enorm.weight is missing" in refusal(lambda: checkpoint.verify(TINY))


def test_an_unexpected_tensor_is_named(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint = single(tmp_path, tensors, **{"layers.5.attn_norm.weight": torch.ones(256)})
    message = refusal(lambda: checkpoint.verify(TINY))
    assert "tensor layers.5.attn_norm.weight (F32 [256]) is unexpected" in message


def test_a_renamed_tensor_is_named_under_both_names(tmp_path: Path, tensors: Tensors) -> None:
    renamed = {"norm.weight": None, "final_norm.weight": tensors["norm.weight"]}
    message = refusal(lambda: single(tmp_path, tensors, **renamed).verify(TINY))
    assert "tensor norm.weight is missing" in message
    assert "tensor final_norm.weight (BF16 [256]) is unexpected" in message


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("norm.weight", torch.ones(128), "is F32 [128]; right: shape [256]"),
        ("norm.weight", torch.ones(256, dtype=torch.int32), "is I32 [256]; right: dtype BF16 or F16 or F32"),
        ("layers.0.ffn.gate.tid2eid", torch.zeros(512, 2), "right: dtype I64 or I32"),
        ("layers.0.hc_attn_base", torch.zeros(23), "right: shape [24]"),
        (WQ_A, torch.zeros(128, 256, dtype=torch.int8), "right: dtype F8_E4M3 or BF16 or F16 or F32"),
        (WQ_A, torch.zeros(256, 128).to(torch.float8_e4m3fn), "right: shape [128, 256] for FP8 codes of [128, 256]"),
        (W1, torch.zeros(128, 256, dtype=torch.int8), "right: shape [128, 128] for FP4 codes of [128, 256], two per"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(
    name: str, value: Tensor, clause: str, tmp_path: Path, tensors: Tensors
) -> None:
    message = refusal(lambda: single(tmp_path, tensors, **{name: value}).verify(TINY))
    assert f"tensor {name} in model.safetensors is" in message
    assert clause in message


def test_packed_codes_declared_as_fp8_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    """B64: the same bytes under the other format have half of the columns."""
    checkpoint = single(tmp_path, tensors, **{W1: tensors[W1].view(torch.float8_e4m3fn)})
    message = refusal(lambda: checkpoint.verify(TINY))
    assert f"tensor {W1} in model.safetensors is F8_E4M3 [128, 128]; right: shape [128, 256]" in message


@pytest.mark.parametrize("shape", [(128, 1), (1, 1), (128, 4), (1, 2)])
def test_a_scale_of_the_other_format_is_refused(shape: tuple[int, int], tmp_path: Path, tensors: Tensors) -> None:
    """B64: scale shape against the format that the weight's dtype declares."""
    name = W1.replace("weight", "scale")
    checkpoint = single(tmp_path, tensors, **{name: torch.ones(shape)})
    message = refusal(lambda: checkpoint.verify(TINY))
    assert f"tensor {name} in model.safetensors is F32 {list(shape)}; right: shape [128, 8]" in message
    assert "one scale per row and 32 columns" in message


def test_a_missing_or_mistyped_scale_is_named(tmp_path: Path, tensors: Tensors) -> None:
    name = WQ_A.replace("weight", "scale")
    assert f"tensor {name} is missing" in refusal(lambda: single(tmp_path, tensors, **{name: None}).verify(TINY))
    bytes_as_integers = {name: tensors[name].view(torch.uint8)}
    message = refusal(lambda: single(tmp_path, tensors, **bytes_as_integers).verify(TINY))
    assert "is U8 [1, 2]; right: dtype F8_E8M0 or F32" in message


def test_a_scale_beside_a_plain_weight_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint = single(tmp_path, tensors, **{WQ_A: torch.zeros(128, 256)})
    assert f"tensor {WQ_A.replace('weight', 'scale')}" in (message := refusal(lambda: checkpoint.verify(TINY)))
    assert "is unexpected" in message


def test_many_faults_come_as_ten_and_a_count(tmp_path: Path, tensors: Tensors) -> None:
    gone = {name: None for name in tensors if ".experts." in name}
    message = refusal(lambda: single(tmp_path, tensors, **gone).verify(TINY))
    assert message.count("is missing") == 10
    assert message.endswith(f"; and {6 * 8 * 3 - 10} more")


def test_another_configuration_is_refused(pristine: Path) -> None:
    message = refusal(lambda: Checkpoint.open(pristine).verify(replace(TINY, n_routed_experts=9)))
    assert "tensor layers.0.ffn.gate.weight" in message
    assert "tensor layers.0.ffn.experts.8.w1.weight is missing" in message


# -- values


def test_scale_byte_255_is_named_when_the_scale_loads(tmp_path: Path, tensors: Tensors) -> None:
    """B08: every other byte is a number, the smallest included."""
    name = WQ_A.replace("weight", "scale")
    for byte, right in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)):
        scale = torch.tensor([[byte, 127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert single(tmp_path, tensors, **{name: scale}).load(name).float()[0, 0].item() == right
    scale = torch.tensor([[127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    message = refusal(lambda: single(tmp_path, tensors, **{name: scale}).load(name))
    assert f"tensor {name} holds scale byte 255" in message
    assert str(tmp_path / "model.safetensors") in message


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_float_scale_that_is_no_scale_is_named(value: float, tmp_path: Path, tensors: Tensors) -> None:
    name = WQ_A.replace("weight", "scale")
    checkpoint = single(tmp_path, tensors, **{name: torch.tensor([[1.0, value]])})
    assert f"tensor {name} holds scale {value}" in refusal(lambda: checkpoint.load(name))


def test_sane_values_pass_with_progress(pristine: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    Checkpoint.open(pristine).check_values(TINY, progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] > 9_000_000
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("norm.weight", torch.full((256,), float("nan")), "has 256 non-finite values of 256"),
        ("embed.weight", torch.full((512, 256), 1e38), "largest magnitude 1e+38"),
        (WQ_A, torch.full((128, 256), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), "has 32768 non-finite"),
        ("layers.0.ffn.gate.tid2eid", torch.full((512, 2), 8), "holds experts 8 to 8; right: 0 to 7"),
    ],
)
def test_insane_values_name_the_tensor(name: str, value: Tensor, clause: str, tmp_path: Path, tensors: Tensors) -> None:
    checkpoint = single(tmp_path, tensors, **{name: value})
    checkpoint.verify(TINY)
    message = refusal(lambda: checkpoint.check_values(TINY, names=[name]))
    assert f"tensor {name} in model.safetensors" in message
    assert clause in message


def test_a_checkpoint_whose_codes_were_cast_as_integers_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    """B20 at a scale that hides it from absolute limits: the mean gives it away."""
    scale = WQ_A.replace("weight", "scale")
    cast = tensors[WQ_A].view(torch.uint8).float() * 2.0**-11
    message = refusal(lambda: single(tmp_path, tensors, **{WQ_A: cast, scale: None}).check_values(TINY, names=[WQ_A]))
    assert f"tensor {WQ_A}" in message
    assert "|mean| at most 0.5 of rms" in message


def test_scale_bytes_copied_into_a_float_tensor_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    """Scale bytes as integers (120.0 for 2^-7) blow the weights up."""
    scale = WQ_A.replace("weight", "scale")
    copied = {scale: tensors[scale].view(torch.uint8).float()}
    assert "largest magnitude" in refusal(lambda: single(tmp_path, tensors, **copied).check_values(TINY, names=[WQ_A]))
