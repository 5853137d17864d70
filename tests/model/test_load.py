"""Loading: every format that a backend may want, the conversion cache, and every kind of released checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hal.errors import CheckpointError, MemoryLimitError
from hal_cpu.device import CpuDevice
from hal_model import load as loading
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS, DSpark, ModelConfig
from hal_model.load import Inventory, Wanted, list_buffers, load_weights, meta_weights, weight_bytes
from hal_model.model import Model, draft
from hal_model.state import Limits, State

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


@pytest.mark.parametrize("want", [wanted("fp8", "fp8"), wanted("dense", "fp4"), wanted("fp8", "dense")], ids=str)
def test_lossless_formats_give_the_logits_of_the_stored_one(
    quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor, want: Wanted
) -> None:
    assert (logits(open_model(quantised_checkpoint, want)) - stored).abs().max() <= 1e-6


def test_decoded_weights_keep_the_rounding_of_activations(
    quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor
) -> None:
    """Dense weights give the stored format's logits; without the rounding they would be off by far more."""
    model = open_model(quantised_checkpoint, wanted("dense", "dense"))
    layer = model.weights.layers[0]
    assert (layer.attn.wq_a.format, layer.attn.wq_a.quantised_act) == ("dense", True)
    assert (logits(model) - stored).abs().max() <= 1e-6


def test_decoded_weights_are_exact_in_bfloat16(quantised_checkpoint: Path, open_model: Open) -> None:
    """Significands of 4 bits at most, times powers of two (spec §3.2)."""
    wide = open_model(quantised_checkpoint, wanted("dense", "dense")).weights
    narrow = open_model(quantised_checkpoint, Wanted(torch.float32, {"fp8": "dense", "fp4": "dense"}, None, torch.bfloat16))
    for a, b in zip(wide.layers, narrow.weights.layers, strict=True):
        assert b.moe.w13.data.dtype == torch.bfloat16
        for x, y in ((a.moe.w13, b.moe.w13), (a.attn.wq_b, b.attn.wq_b), (a.moe.shared_w2, b.moe.shared_w2)):
            assert torch.equal(x.data, y.data.float())
        assert torch.equal(a.attn.wo_a, b.attn.wo_a.float())


def test_fnuz_weights_decode_to_the_same_values(quantised_checkpoint: Path, open_model: Open) -> None:
    """The code that means NaN there (-0) is never written (fault kind K1)."""
    fn, fnuz = (open_model(quantised_checkpoint, wanted(f, "fp4")) for f in ("fp8", "fnuz"))
    for a, b in zip(fn.weights.layers, fnuz.weights.layers, strict=True):
        for x, y in ((a.attn.wkv, b.attn.wkv), (a.moe.shared_w13, b.moe.shared_w13)):
            assert y.data.dtype == torch.float8_e4m3fnuz
            assert x.scale is not None
            assert y.scale is not None
            spread = [w.scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1) for w in (x, y) if w.scale is not None]
            assert torch.equal(x.data.float() * spread[0], y.data.float() * spread[1])


def test_fnuz_logits_are_near(quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor) -> None:
    """Activations round to another grid (largest code 240), so logits move by roundings; measured: see the bound."""
    got = logits(open_model(quantised_checkpoint, wanted("fnuz", "fp8")))
    assert 0 < (got - stored).abs().mean() < 0.05


def test_int8_logits_are_near(quantised_checkpoint: Path, open_model: Open, logits: Logits, stored: Tensor) -> None:
    got = logits(open_model(quantised_checkpoint, wanted("int8", "int8")))
    relative = (got - stored).norm() / stored.norm()
    assert 1e-3 < relative < 0.5, relative


def test_a_conversion_that_does_not_exist_names_tensor_and_formats(quantised_checkpoint: Path, open_model: Open) -> None:
    with pytest.raises(CheckpointError, match=r"tensor layers\.0\..*\.weight: no conversion to fp4"):
        open_model(quantised_checkpoint, wanted("fp4", "fp4"))
