"""Loading: every format that a backend may want, the conversion cache, and every kind of released checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hal.arena import WEIGHTS_FLAG
from hal.errors import CheckpointError, MemoryLimitError
from hal_cpu.device import CpuDevice
from hal_model import load as loading
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS, DSpark, ModelConfig
from hal_model.load import Inventory, Wanted, list_buffers, load_weights, meta_weights, weight_bytes
from hal_model.model import Model
from hal_model.state import Limits, State
from hal_model.weights import Layer
from hal_ops import Weight

Open = Callable[..., Model]
Chunked = Callable[[Model, State, Sequence[int], Sequence[int]], Tensor]
Logits = Callable[[Model], Tensor]

TINY = PRESETS["tiny"]
F32 = Wanted(torch.float32)


def wanted(fp8: str, fp4: str, carrier: torch.dtype = torch.float32) -> Wanted:
    return Wanted(carrier, {"fp8": fp8, "fp4": fp4})


@pytest.fixture(scope="module")
def logits(state_of: Callable[..., State], chunked: Chunked, golden_ids: list[int]) -> Logits:
    """Logits of 24 tokens."""
    return lambda model: chunked(model, state_of(model, Limits(1, 32, 32)), golden_ids[:24], (13,))


@pytest.fixture(scope="module")
def stored(quantised_checkpoint: Path, open_model: Open, logits: Logits) -> Tensor:
    """Logits with weights as stored."""
    return logits(open_model(quantised_checkpoint))


# --- formats


@pytest.mark.parametrize(
    "formats", [("fp8", "fp8"), ("dense", "fp4"), ("fp8", "dense"), ("dense", "dense")], ids=lambda f: "-".join(f)
)
def test_lossless_formats_give_the_logits_of_the_stored_ones(
    quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor, formats: tuple[str, str]
) -> None:
    """Decoded weights too: their activations are still rounded to FP8, as in training."""
    assert (logits(open_model(quantised_checkpoint, wanted(*formats))) - stored).abs().max() <= 1e-6


def decoded(w: Weight) -> Tensor:
    """Values of a held weight [..., N, K], from its codes and scales (spec §3.1)."""
    if w.scale is None:
        return w.data.float()
    if w.format == "int8":
        return w.data.float() * w.scale[..., None]
    scale = w.scale.float()
    if w.format == "fp4":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = w.data.view(torch.uint8)
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
        return torch.where(nibbles > 7, -1.0, 1.0) * table[nibbles % 8] * scale.repeat_interleave(32, -1)
    return w.data.float() * scale.repeat_interleave(128, -1).repeat_interleave(128, -2)


def quantised(layer: Layer) -> dict[str, Weight]:
    """The quantised weights of a layer that are held as :class:`Weight`."""
    a, m = layer.attn, layer.moe
    out = {"wq_a": a.wq_a, "wq_b": a.wq_b, "wkv": a.wkv, "wo_b": a.wo_b, "w13": m.w13, "w2": m.w2}
    out |= {"shared_w13": m.shared_w13, "shared_w2": m.shared_w2}
    return out | ({"index wq_b": a.indexer.wq_b} if a.indexer else {})


@pytest.mark.parametrize(
    ("formats", "dense"),
    [
        (("dense", "dense"), torch.float32),
        (("dense", "dense"), torch.bfloat16),
        (("fp8", "fp8"), None),
        (("fnuz", "fp4"), None),
        (("fnuz", "fnuz"), None),
    ],
    ids=str,
)
def test_no_value_changes_in_a_lossless_format(
    quantised_checkpoint: Path, open_model: Open, formats: tuple[str, str], dense: torch.dtype | None
) -> None:
    """bfloat16 is exact too: significands of at most 4 bits times powers of two (spec §3.2)."""
    right = open_model(quantised_checkpoint).weights
    want = replace(wanted(*formats), dense=dense)
    for a, b in zip(right.layers, open_model(quantised_checkpoint, want).weights.layers, strict=True):
        assert torch.equal(a.attn.wo_a.float(), b.attn.wo_a.float())
        for name, w in quantised(b).items():
            assert torch.equal(decoded(w), decoded(quantised(a)[name])), name


def test_fnuz_codes_are_of_that_dialect(quantised_checkpoint: Path, open_model: Open) -> None:
    for layer in open_model(quantised_checkpoint, wanted("fnuz", "fnuz")).weights.layers:
        for w in quantised(layer).values():
            assert w.data.dtype == torch.float8_e4m3fnuz
            assert not (w.data.view(torch.uint8) == 0x80).any()


def relative(got: Tensor, right: Tensor) -> float:
    return float((got - right).norm() / right.norm())


def test_fnuz_logits_are_near(quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor) -> None:
    """Activations round to the other dialect, which differs where values are tiny; measured 2.7e-3 of the logits' norm."""
    assert 0 < relative(logits(open_model(quantised_checkpoint, wanted("fnuz", "fnuz"))), stored) < 1e-2


def test_int8_logits_are_near(quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor) -> None:
    """Measured 0.20 of the logits' norm: random FP8 codes spread over 2^15, which one scale per row cannot hold."""
    assert 0 < relative(logits(open_model(quantised_checkpoint, wanted("int8", "int8"))), stored) < 0.3


def test_int8_weights_are_within_half_a_step(quantised_checkpoint: Path, open_model: Open) -> None:
    right, rounded = (open_model(quantised_checkpoint, wanted(f, f)).weights for f in ("dense", "int8"))
    for a, b in zip(right.layers, rounded.layers, strict=True):
        for name, w in quantised(b).items():
            assert w.scale is not None
            error = (decoded(w) - decoded(quantised(a)[name])).abs()
            assert (error <= w.scale[..., None] * 0.5001).all(), name


@pytest.mark.parametrize(("formats", "refused"), [(("fp4", "fp4"), "layers.0.attn.wq_a"), (("nf4", "fp4"), "layers.0")])
def test_a_conversion_that_does_not_exist_names_the_tensor(
    quantised_checkpoint: Path, open_model: Open, formats: tuple[str, str], refused: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(refused)}.*\.weight: no conversion to {formats[0]}"):
        open_model(quantised_checkpoint, wanted(*formats))


@pytest.fixture
def rewritten(tmp_path: Path, quantised_checkpoint: Path) -> Callable[..., Path]:
    """``rewritten(change, config)``: a copy as one file whose tensors went through ``change(name, tensor)`` (None: drop)."""

    def write(
        change: Callable[[str, Tensor], Tensor | None], config: ModelConfig = TINY, of: Path | None = None
    ) -> Path:
        tensors: dict[str, Tensor] = {}
        for file in (of or quantised_checkpoint).glob("*.safetensors"):
            tensors |= load_file(file)
        changed = {name: change(name, t) for name, t in tensors.items()}
        out = tmp_path / "rewritten"
        out.mkdir()
        save_file({name: t for name, t in changed.items() if t is not None}, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(config.to_dict()))
        return out

    return write


def test_a_conversion_that_would_lose_values_names_the_tensor(rewritten: Callable[..., Path], open_model: Open) -> None:
    """FP4 to FP8 holds scales that span 2^14 in a block, not more (spec §3.2)."""

    def spread(name: str, t: Tensor) -> Tensor:
        if name == "layers.2.ffn.experts.3.w2.scale":
            t.view(torch.uint8)[0, :2] = torch.tensor([100, 130], dtype=torch.uint8)
        return t

    folder = rewritten(spread)
    with pytest.raises(CheckpointError, match=r"tensor layers\.2\.ffn\.experts\.3\.w2\.weight: .*span more than 2\^14"):
        open_model(folder, wanted("fp8", "fp8"))


# --- sizing without a checkpoint


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("dense", "dense"), ("int8", "int8"), ("fnuz", "fp8")], ids=str)
def test_a_config_alone_tells_the_bytes(
    quantised_checkpoint: Path, device: CpuDevice, formats: tuple[str, str]
) -> None:
    want = wanted(*formats)
    _, placed = meta_weights(TINY, Inventory(TINY), want)
    _, arena = load_weights(TINY, Checkpoint.open(quantised_checkpoint), want, device)
    assert weight_bytes(placed) == arena.used == arena.capacity


def test_progress_ends_at_the_total(quantised_checkpoint: Path, device: CpuDevice) -> None:
    seen: list[tuple[int, int, str]] = []
    load_weights(TINY, Checkpoint.open(quantised_checkpoint), F32, device, progress=lambda *a: seen.append(a))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {seen[-1][1]}
    assert seen[0][2] == "embed.weight"


class Full(CpuDevice):
    """A device without room."""

    def free_bytes(self) -> int:
        return 1 << 20


def test_weights_that_do_not_fit_name_the_flag(quantised_checkpoint: Path) -> None:
    with pytest.raises(MemoryLimitError, match=f"weights: .* needed, .* free; change {WEIGHTS_FLAG}"):
        load_weights(TINY, Checkpoint.open(quantised_checkpoint), F32, Full())


# --- conversion cache


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the linears converted from now on."""
    names: list[str] = []
    convert = loading.convert

    def spy(source: loading.Source, name: str, held: str, carrier: torch.dtype) -> tuple[Tensor, Tensor | None]:
        names.append(name)
        return convert(source, name, held, carrier)

    monkeypatch.setattr(loading, "convert", spy)
    return names


def cached(folder: Path, device: CpuDevice, cache: Path, want: Wanted) -> list[Tensor]:
    return list_buffers(load_weights(TINY, Checkpoint.open(folder), want, device, cache=cache)[0])


DENSE = wanted("dense", "dense", torch.bfloat16)


def test_a_second_load_reads_the_cache(
    quantised_checkpoint: Path, device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = spied(monkeypatch)
    first = cached(quantised_checkpoint, device, tmp_path, DENSE)
    assert "layers.4.ffn.experts.7.w2" in names
    names.clear()
    second = cached(quantised_checkpoint, device, tmp_path, DENSE)
    assert not names
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert sorted(f.suffix for f in tmp_path.iterdir()) == [".bin", ".json"]


def test_other_formats_and_other_files_have_entries_of_their_own(
    quantised_checkpoint: Path, rewritten: Callable[..., Path], device: CpuDevice, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for want in (DENSE, replace(DENSE, dense=torch.float32), replace(DENSE, wide=torch.float32), wanted("fp8", "fp4")):
        cached(quantised_checkpoint, device, cache, want)
    other = rewritten(lambda _, t: t)
    plain = cached(other, device, cache, DENSE)
    file = other / "model.safetensors"
    assert len(list(cache.glob("*.bin"))) == 5
    tensors = load_file(file)
    tensors["layers.0.attn.attn_sink"] += 1
    save_file(tensors, file)
    changed = cached(other, device, cache, DENSE)
    assert not all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".bin", flip, "content does not match its digest"),
        (".bin", cut, r"\d+ bytes, right is \d+"),
        (".bin", Path.unlink, r"0 bytes, right is \d+"),
        (".json", lambda f: f.write_text('{"sha256": "0'), "holds no digest"),
        (".json", lambda f: f.write_text("{}"), "holds no digest"),
        (".json", lambda f: f.write_text("[]"), "holds no digest"),
    ],
)
def test_a_damaged_cache_names_its_file(
    quantised_checkpoint: Path,
    device: CpuDevice,
    tmp_path: Path,
    suffix: str,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    cached(quantised_checkpoint, device, tmp_path, DENSE)
    file = next(tmp_path.glob(f"*{suffix}"))
    damage(file)
    with pytest.raises(CheckpointError, match=rf"weight cache {re.escape(str(file))}: {message}.*; delete it"):
        cached(quantised_checkpoint, device, tmp_path, DENSE)


def test_an_interrupted_load_leaves_no_entry(
    quantised_checkpoint: Path, device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> tuple[Tensor, Tensor | None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "convert", stop)
    with pytest.raises(KeyboardInterrupt):
        cached(quantised_checkpoint, device, tmp_path, DENSE)
    assert not list(tmp_path.iterdir())


# --- kinds of checkpoints


def test_a_dspark_checkpoint_loads_with_its_stages_unused(
    tmp_path: Path, open_model: Open, logits: Logits, quantised_checkpoint: Path
) -> None:
    """The 0731 kind: three draft stages, which this build recognises and does not run."""
    dspark = DSpark(5, 500, (1, 2, 4), 128)
    config, folder = replace(TINY, draft_ratios=(0, 0, 0), dspark=dspark), tmp_path / "dspark"
    init_checkpoint(config, folder, initializer="golden")
    report = Checkpoint.open(folder).verify(config)
    assert report.draft == "dspark"
    assert report.unused
    model = open_model(folder)
    assert model.config == replace(config, expert_dtype="fp4")
    assert model.weights.mtp is None
    assert torch.equal(logits(model), logits(open_model(quantised_checkpoint)))


def test_float32_scales_mean_the_same_as_exponent_bytes(
    rewritten: Callable[..., Path], tmp_path: Path, open_model: Open, logits: Logits
) -> None:
    """The Base kind: routed experts in FP8, scales stored as F32 (spec §1.3, pitfall V8)."""
    folder, config = tmp_path / "base", replace(TINY, expert_dtype="fp8")
    init_checkpoint(config, folder, experts="fp8", initializer="golden")
    base = rewritten(lambda name, t: t.float() if name.endswith(".scale") else t, config, folder)
    report = Checkpoint.open(base).verify(config)
    assert (report.experts, report.scales) == (("fp8",), ("F32",))
    right = logits(open_model(folder))
    for formats in (("fp8", "fp4"), ("dense", "fp4"), ("fp8", "dense")):
        assert (logits(open_model(base, wanted(*formats))) - right).abs().max() <= 1e-6


@pytest.mark.parametrize("held", ["fp8", "fnuz", "dense"])
def test_float32_scales_that_are_no_powers_of_two_are_kept(
    rewritten: Callable[..., Path], tmp_path: Path, open_model: Open, held: str
) -> None:
    folder, config = tmp_path / "base", replace(TINY, expert_dtype="fp8")
    init_checkpoint(config, folder, experts="fp8", initializer="golden")
    base = rewritten(lambda name, t: t.float() * 1.3 if name.endswith(".scale") else t, config, folder)
    right, got = (open_model(f, wanted(h, "fp4")).weights for f, h in ((folder, "dense"), (base, held)))
    for a, b in zip(right.layers, got.layers, strict=True):
        for name, w in quantised(b).items():
            torch.testing.assert_close(decoded(w), decoded(quantised(a)[name]) * 1.3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("declared", [0, 1])
def test_a_checkpoint_without_draft_block_loads(
    rewritten: Callable[..., Path], open_model: Open, logits: Logits, stored: Tensor, declared: int
) -> None:
    """Whether or not the config still counts one."""
    config = replace(TINY, num_nextn_predict_layers=declared, draft_ratios=(0,) * declared)
    folder = rewritten(lambda name, t: None if name.startswith("mtp.") else t, config)
    assert Checkpoint.open(folder).verify(config).draft == ("absent" if declared else "none")
    model = open_model(folder)
    assert model.weights.mtp is None
    assert torch.equal(logits(model), stored)


def test_a_missing_tensor_is_named(rewritten: Callable[..., Path], open_model: Open) -> None:
    folder = rewritten(lambda name, t: None if name == "layers.3.attn.wkv.weight" else t)
    with pytest.raises(CheckpointError, match=r"tensor layers\.3\.attn\.wkv\.weight is missing"):
        open_model(folder)
