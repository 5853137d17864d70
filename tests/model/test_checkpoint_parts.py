"""Parts of the checkpoint reader on their own: tensor names, and statistics of decoded weights."""

from __future__ import annotations

import pytest
import torch

from hal_model.checkpoint.names import official_name
from hal_model.checkpoint.values import LINEAR, out_of_band, stats


@pytest.mark.parametrize(
    ("stored", "official"),
    [
        ("layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.weight"),
        ("model.layers.0.self_attn.q_a_proj.weight_scale_inv", "layers.0.attn.wq_a.scale"),
        ("model.layers.4.mlp.experts.7.down_proj.weight", "layers.4.ffn.experts.7.w2.weight"),
        ("model.layers.4.mlp.gate.e_score_correction_bias", "layers.4.ffn.gate.bias"),
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("mtp.0.embed_tokens.weight", None),
        ("mtp.0.head.weight", None),
        ("mtp.0.e_proj.weight", "mtp.0.e_proj.weight"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w1.weight"),
    ],
)
def test_names_follow_the_converter(stored: str, official: str | None) -> None:
    assert official_name(stored) == official


def test_decoded_values_of_known_bytes() -> None:
    """B20: FP8 bytes are codes, not integers."""
    codes = torch.tensor([[0x38, 0xB8, 0x40]], dtype=torch.uint8)
    scale = torch.tensor([[124]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    right = stats(codes.view(torch.float8_e4m3fn), scale)
    assert right.mean == pytest.approx(0.25 / 3)
    assert right.largest == 0.25
    assert list(out_of_band(right, LINEAR)) == []
    wrong = " ".join(out_of_band(stats(codes.float(), None), LINEAR))
    assert "largest magnitude 184" in wrong
    assert "mean 101.333" in wrong


def test_decoded_values_of_packed_bytes() -> None:
    """Low nibble first, one scale per 32 columns: 0x2F is -6 then 1 (spec A.5)."""
    packed = torch.full((2, 32), 0x2F, dtype=torch.int8)
    scale = torch.tensor([[127, 128], [127, 127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = stats(packed, scale)
    assert found.count == 128
    assert found.largest == 12.0
    assert found.mean == pytest.approx(-2.5 * (1 + 2 + 1 + 1) / 4)


def test_statistics_agree_with_a_direct_decoding_of_uneven_blocks() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [0.5, 4.0], [8.0, 0.25]])
    rows, columns = torch.arange(300) // 128, torch.arange(200) // 128
    decoded = weight.double() * scale[rows][:, columns].double()
    found = stats(weight, scale)
    assert found.mean == pytest.approx(decoded.mean().item(), abs=1e-6)
    assert found.rms == pytest.approx(decoded.square().mean().sqrt().item(), rel=1e-5)
    assert found.largest == decoded.abs().max().item()
