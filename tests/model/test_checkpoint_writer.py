"""Fresh checkpoints: official format, golden values, all or nothing, the same bytes for the same seed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hal.errors import UsageError
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS, ModelConfig
from hal_model.inventory import tensors

TINY = PRESETS["tiny"]
INDEX = "model.safetensors.index.json"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("golden") / "tiny"
    init_checkpoint(TINY, out, experts="f32", dense="f32", initializer="golden")
    return Checkpoint.open(out)


@pytest.fixture(scope="module")
def golden_quantised(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("golden-quantised") / "tiny"
    init_checkpoint(TINY, out, initializer="golden")
    return Checkpoint.open(out)


def test_golden_weights_have_the_published_check_values(golden: Checkpoint) -> None:
    """Spec A.1."""
    assert len(golden.names) == 312
    wq_a = golden.load("layers.0.attn.wq_a.weight")
    assert wq_a[0, :4].tolist() == [-0.10107421875, 0.040283203125, -0.0225830078125, -0.0751953125]
    assert wq_a.sum(dtype=torch.float64).item() == 15.699580937623978
    assert golden.load("embed.weight")[5, :4].tolist() == [-0.171875, 0.875, 0.0130615234375, 0.671875]
    fn = golden.load("layers.0.hc_attn_fn")[0, :4]
    assert fn.tolist() == pytest.approx([-7.783656e-05, -0.016915655, 0.019555511, -0.010257254], rel=1e-6)
    ape = golden.load("layers.1.attn.compressor.ape")[1, :4]
    assert ape.tolist() == pytest.approx([0.48302314, -0.27079731, 0.34726119, -0.38981938], rel=1e-7)


def test_golden_expert_table(golden: Checkpoint) -> None:
    table = golden.load("layers.1.ffn.gate.tid2eid")
    right = [[(7 * t + 3 * k + 1) % 8 for k in range(2)] for t in range(512)]
    assert table.tolist() == right


def test_golden_weights_are_bfloat16_values_except_the_float_tensors(golden: Checkpoint) -> None:
    for spec in tensors(TINY):
        if spec.name not in golden or spec.dtype in ("I64", "F8_E8M0"):
            continue
        values = golden.load(spec.name)
        assert values.dtype == torch.float32
        assert torch.equal(values, values.bfloat16().float()) == (spec.dtype != "F32"), spec.name


def test_golden_bfloat16_file_holds_the_same_values(golden: Checkpoint, tmp_path: Path) -> None:
    init_checkpoint(TINY, tmp_path / "tiny", experts="bf16", dense="bf16", initializer="golden")
    narrow = Checkpoint.open(tmp_path / "tiny")
    assert narrow.spec("layers.0.attn.wq_a.weight").dtype == "BF16"
    assert all(torch.equal(narrow.load(name).float(), golden.load(name).float()) for name in golden.names)


def code_byte(name: str, i: int) -> int:
    """Spec A.1 and A.4 in integers of any size, element by element."""
    h = (i * 2654435761 + zlib.crc32(name.encode())) % 2**32
    h ^= h >> 16
    h = h * 2246822519 % 2**32
    h ^= h >> 13
    h = h * 3266489917 % 2**32
    h ^= h >> 16
    return (h >> 8) % 256


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("layers.0.attn.wq_a.weight", 127 - (7 + 4)),
        ("layers.2.attn.wo_a.weight", 127 - (7 + 5)),
        ("layers.4.ffn.experts.7.w1.weight", 127 - (2 + 4)),
        ("mtp.0.ffn.experts.0.w2.weight", 127 - (2 + 4)),
    ],
)
def test_golden_codes_and_scales_follow_the_rule(name: str, fixed: int, golden_quantised: Checkpoint) -> None:
    """Spec A.4; ``fixed`` by hand: inputs 256 and 512 and, for w2, 128."""
    weight, scale_name = golden_quantised.load(name), name.replace("weight", "scale")
    codes = weight.view(torch.uint8).flatten()
    nan_to_finite = {0x7F: 0x7E, 0xFF: 0xFE} if weight.dtype == torch.float8_e4m3fn else {}
    right = [nan_to_finite.get(b, b) for b in (code_byte(name, i) for i in range(2000))]
    assert codes[:2000].tolist() == right
    scales = golden_quantised.load(scale_name).view(torch.uint8).flatten()
    assert scales.tolist() == [fixed + code_byte(scale_name, i) % 2 for i in range(scales.numel())]


def test_no_written_code_is_not_a_number(golden_quantised: Checkpoint) -> None:
    assert any(golden_quantised.spec(name).dtype == "F8_E4M3" for name in golden_quantised.names)
    golden_quantised.check_values(TINY)


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_library_reads_what_was_written(preset: str, tmp_path: Path) -> None:
    config = replace(PRESETS[preset], n_routed_experts=4, num_experts_per_tok=2)
    written = init_checkpoint(config, tmp_path / "out", shard_bytes=8 << 20)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    right = {spec.name: spec for spec in tensors(config)}
    assert index["metadata"]["total_size"] == written.nbytes == sum(spec.nbytes for spec in right.values())
    assert index["weight_map"].keys() == right.keys()
    assert len(set(index["weight_map"].values())) == written.shards > 1
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensor = shard.get_tensor(name)
                assert (tuple(tensor.shape), tensor.dtype) == (right[name].shape, right[name].torch_dtype)
                assert index["weight_map"][name] == file


def test_data_is_aligned_so_that_loading_never_copies(golden_quantised: Checkpoint) -> None:
    for name in golden_quantised.names:
        assert golden_quantised.stored(name).offset % golden_quantised.spec(name).torch_dtype.itemsize == 0


@pytest.mark.parametrize(("experts", "dense"), [("fp4", "fp8"), ("fp8", "fp8"), ("bf16", "fp8"), ("bf16", "bf16")])
def test_what_is_written_verifies_in_every_format(experts: Any, dense: Any, tmp_path: Path) -> None:
    init_checkpoint(TINY, tmp_path / "tiny", experts=experts, dense=dense)
    config = ModelConfig.from_dir(tmp_path / "tiny")
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    report = checkpoint.verify(config)
    assert (report.experts, report.dense, report.notes) == ((experts,), (dense,), ())
    assert config.expert_dtype == (experts if experts != "bf16" else None)
    assert replace(config, expert_dtype=TINY.expert_dtype) == TINY
    checkpoint.check_values(config)


def test_the_reference_library_understands_the_configuration_file(tmp_path: Path) -> None:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    init_checkpoint(TINY, tmp_path / "tiny")
    config = DeepseekV4Config.from_pretrained(tmp_path / "tiny")
    assert (config.layer_types or [])[1:2] == ["compressed_sparse_attention"]
    assert config.quantization_config["weight_block_size"] == [128, 128]
    generation = json.loads((tmp_path / "tiny" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, 1)


def test_same_seed_same_bytes_whatever_the_shards(tmp_path: Path) -> None:
    init_checkpoint(TINY, tmp_path / "a", seed=7)
    init_checkpoint(TINY, tmp_path / "b", seed=7)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    init_checkpoint(TINY, tmp_path / "c", seed=7, shard_bytes=1 << 20)
    init_checkpoint(TINY, tmp_path / "d", seed=8)
    a, c, d = (Checkpoint.open(tmp_path / name) for name in "acd")
    for name in a.names:
        same = a.load(name).view(torch.uint8)
        assert torch.equal(same, c.load(name).view(torch.uint8))
        if same.numel() > 100:
            assert not torch.equal(same, d.load(name).view(torch.uint8)), name


def test_random_bits_do_not_depend_on_how_a_tensor_is_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_checkpoint(TINY, tmp_path / "whole", seed=1)
    monkeypatch.setattr("hal_model.checkpoint.initial.PIECE", 96)
    config = replace(TINY, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=1)
    init_checkpoint(config, tmp_path / "pieces", seed=1)
    whole, pieces = Checkpoint.open(tmp_path / "whole"), Checkpoint.open(tmp_path / "pieces")
    for name in pieces.names:
        assert torch.equal(pieces.load(name).view(torch.uint8), whole.load(name).view(torch.uint8)), name


def test_random_linears_keep_the_size_of_their_input(tmp_path: Path) -> None:
    init_checkpoint(TINY, tmp_path / "tiny")
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    codes, scale = checkpoint.load("layers.0.attn.wq_b.weight"), checkpoint.load("layers.0.attn.wq_b.scale").float()
    weight = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    assert 0.3 < (x @ weight.T).square().mean().sqrt().item() < 3.0


def test_random_experts_of_a_token_are_distinct_and_vary(tmp_path: Path) -> None:
    init_checkpoint(TINY, tmp_path / "tiny")
    table = Checkpoint.open(tmp_path / "tiny").load("layers.0.ffn.gate.tid2eid")
    assert bool((table[:, 0] != table[:, 1]).all())
    assert set(table.flatten().tolist()) == set(range(8))


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    written = init_checkpoint(TINY, tmp_path / "tiny", progress=lambda *step: seen.append(step), shard_bytes=3 << 20)
    assert seen[-1][:2] == (written.nbytes, written.nbytes)
    assert len({label for _, _, label in seen}) == written.shards


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
def test_nothing_remains_of_an_interrupted_write(error: type[BaseException], tmp_path: Path) -> None:
    def stop(done: int, total: int, _label: str) -> None:
        if done > total // 2:
            raise error("stop")

    with pytest.raises(UsageError if error is OSError else error):
        init_checkpoint(TINY, tmp_path / "new" / "tiny", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_a_full_one_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    init_checkpoint(TINY, tmp_path / "tiny")
    before = files(tmp_path / "tiny")
    with pytest.raises(UsageError, match="is not empty; right: a new or empty folder"):
        init_checkpoint(TINY, tmp_path / "tiny")
    assert files(tmp_path / "tiny") == before
    with pytest.raises(UsageError, match="is a file"):
        init_checkpoint(TINY, tmp_path / "tiny" / "config.json")


def test_a_small_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 5000, 5000))
    with pytest.raises(UsageError, match=r"needed 159610534472 bytes, free 5000"):
        init_checkpoint(PRESETS["flash"], tmp_path / "flash")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"initializer": "zeros"}, {"shard_bytes": 0}, {"experts": "int4"}, {"dense": "fp4"}])
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(next(iter(wrong.values())))):
        init_checkpoint(TINY, tmp_path / "tiny", **wrong)
    assert list(tmp_path.iterdir()) == []


MEMORY = """
import resource, sys
from dataclasses import replace
from hal_model.checkpoint import init_checkpoint
from hal_model.config import PRESETS
config = replace(PRESETS["tiny"], vocab_size=int(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
written = init_checkpoint(config, sys.argv[1])
print(written.nbytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Over 100 MB of embedding and head are written with pieces of a few MB in memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "wide"), "100000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    nbytes, grown = map(int, done.stdout.split())
    assert nbytes > 110_000_000
    assert grown < 80_000_000
