"""Normalisation and rotary embedding against loops in plain Python (spec §2.3-2.5; faults B11, B12, B14; kind K5)."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from torch import Tensor

from hal_ops import generator, head_rms_norm, query_norm_rope, rms_norm, rope
from hal_ops.rotary import frequencies, yarn_frequencies

BF16, F64 = torch.bfloat16, torch.float64
POSITIONS = (0, 1, 127, 128, 4096, 65_535, 65_536, 1_000_000)


def bf16(x: float) -> float:
    """``x`` rounded to bfloat16, nearest even, by its float32 bits (x must be a float32 value)."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def f32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def half_step(x: float) -> float:
    """Half the distance between bfloat16 values around ``x``: the error of one rounding."""
    return 2.0 ** (math.floor(math.log2(abs(x))) - 8) if x else 0.0


def rms(row: list[float], weight: list[float], eps: float) -> list[float]:
    factor = 1 / math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
    return [v * factor * w for v, w in zip(row, weight, strict=True)]


def turned(row: list[float], position: int, freqs: list[float], sign: int = 1) -> list[float]:
    """Rotate the last pairs of ``row`` by float32(position)·float32(frequency), rounded once to float32."""
    out, start = list(row), len(row) - 2 * len(freqs)
    for i, f in enumerate(freqs):
        angle = sign * f32(f32(position) * f)
        a, b = row[start + 2 * i], row[start + 2 * i + 1]
        out[start + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[start + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def close(seen: Tensor, right: list[float], atol: float) -> bool:
    return all(abs(s - r) <= atol for s, r in zip(seen.flatten().tolist(), right, strict=True))


# Normalisation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["normal", "positive", "outliers", "rows"])
def test_rms_norm_is_the_formula_in_double_precision(family: str) -> None:
    x, w = generator.draw(family, "rms", (5, 96)).double(), (generator.normal("w", (96,)) * 0.1 + 1).double()
    y = rms_norm(x, w, 1e-6)
    for row, seen in zip(x.tolist(), y, strict=True):
        assert close(seen, rms(row, w.tolist(), 1e-6), 1e-12)


def test_rms_norm_rounds_once_after_the_weight() -> None:
    """Rounding before the multiplication doubles the error: pitfall H2."""
    x, w = generator.normal("once", (16, 96)).to(BF16), generator.normal("w", (96,)) * 0.1 + 1
    y = rms_norm(x, w, 1e-6)
    assert y.dtype == BF16
    twice = 0
    for row, seen in zip(x.double().tolist(), y.tolist(), strict=True):
        right = rms(row, w.tolist(), 1e-6)
        early = [bf16(f32(bf16(f32(r / g)) * g)) for r, g in zip(right, w.tolist(), strict=True)]
        assert all(abs(s - r) <= half_step(r) * 1.001 for s, r in zip(seen, right, strict=True))
        twice += sum(abs(e - r) > half_step(r) * 1.001 for e, r in zip(early, right, strict=True))
    assert twice > 100


def test_rms_norm_of_zeros_is_zeros() -> None:
    assert bool((rms_norm(torch.zeros(2, 8, dtype=BF16), torch.ones(8), 1e-6) == 0).all())
    assert rms_norm(torch.zeros(0, 8, dtype=BF16), torch.ones(8), 1e-6).shape == (0, 8)


def test_rms_norm_takes_any_leading_dimensions() -> None:
    x, w = generator.normal("lead", (2, 3, 4, 16)), torch.ones(16)
    assert torch.equal(rms_norm(x, w, 1e-6).view(24, 16), rms_norm(x.view(24, 16), w, 1e-6))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_head_norm_rounds_square_mean_sum_root_and_product_to_the_carrier(scale: float) -> None:
    """At the smaller scale eps is as large as the mean, and the rounding of their sum shows."""
    x = (generator.normal("heads", (4, 3, 64)) * scale).to(BF16)
    y, differs = head_rms_norm(x, 1e-6), 0
    for row, seen in zip(x.view(-1, 64).tolist(), y.view(-1, 64).tolist(), strict=True):
        mean = bf16(f32(math.fsum(bf16(f32(v * v)) for v in row) / 64))
        root = bf16(f32(1 / math.sqrt(bf16(f32(mean + 1e-6)))))
        assert seen == [bf16(f32(v * root)) for v in row]
        differs += seen != [bf16(f32(v)) for v in rms(row, [1.0] * 64, 1e-6)]
    assert differs > 0


def test_head_norm_in_double_precision_is_the_formula() -> None:
    x = generator.normal("heads", (2, 3, 64)).double()
    for row, seen in zip(x.view(-1, 64).tolist(), head_rms_norm(x, 1e-6).view(-1, 64), strict=True):
        assert close(seen, rms(row, [1.0] * 64, 1e-6), 1e-12)


# Frequencies --------------------------------------------------------------------------------------------------------


def released() -> list[float]:
    freqs = yarn_frequencies(64, 160_000.0, factor=16, beta_fast=32, beta_slow=1, original_length=65_536)
    values: list[float] = freqs.tolist()
    return values


def test_plain_frequencies_have_the_released_values() -> None:
    base = frequencies(64, 10_000.0).tolist()
    assert len(base) == 32
    for i, right in ((0, 1.0), (1, 7.498942018e-01), (15, 1.333521493e-02), (31, 1.333521504e-04)):
        assert base[i] == pytest.approx(right, rel=2e-7)


def test_yarn_frequencies_have_the_released_values() -> None:
    table = {0: 1.0, 14: 5.286856554e-03, 15: 3.635538509e-03, 16: 2.265624935e-03, 20: 2.969777852e-04}
    table |= {24: 1.953125320e-05, 25: 5.372312444e-06, 31: 5.680529398e-07}
    for i, right in table.items():
        assert released()[i] == pytest.approx(right, rel=2e-7)


def test_yarn_frequencies_of_the_tiny_configuration() -> None:
    """Spec A.1: original length 64."""
    freqs = yarn_frequencies(64, 160_000.0, factor=16, beta_fast=32, beta_slow=1, original_length=64).tolist()
    assert freqs[:6] == pytest.approx([1.0, 0.5955593, 0.3462090, 0.1945228, 0.1038174, 0.0507972], rel=1e-6)
    assert freqs[-2:] == pytest.approx([8.260713e-07, 5.680529e-07], rel=1e-6)


def test_yarn_keeps_fast_and_divides_slow_frequencies() -> None:
    base, stretched = frequencies(64, 160_000.0).tolist(), released()
    assert stretched[:16] == base[:16]
    assert stretched[25:] == pytest.approx([f / 16 for f in base[25:]], rel=1e-6)
    assert all(a > b for a, b in itertools.pairwise(stretched))


# Rotation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("table", ["plain", "yarn"])
def test_b12_rotation_equals_a_hand_written_one(table: str, inverse: bool) -> None:
    freqs = frequencies(64, 10_000.0) if table == "plain" else torch.tensor(released())
    x = generator.normal("rope", (len(POSITIONS), 2, 96)).double()
    y = rope(x, torch.tensor(POSITIONS), freqs, inverse)
    for t, position in enumerate(POSITIONS):
        for head in range(2):
            right = turned(x[t, head].tolist(), position, freqs.tolist(), -1 if inverse else 1)
            assert close(y[t, head], right, 1e-12)


def test_rotation_in_float32_and_bf16_is_one_rounding_away() -> None:
    x, freqs = generator.normal("rope", (len(POSITIONS), 1, 64)).to(BF16), frequencies(64, 10_000.0)
    wide = rope(x.float(), torch.tensor(POSITIONS), freqs)
    narrow = rope(x, torch.tensor(POSITIONS), freqs)
    assert torch.equal(wide.to(BF16), narrow)
    for t, position in enumerate(POSITIONS):
        assert close(wide[t], turned(x[t, 0].tolist(), position, freqs.tolist()), 2e-6)


def test_b11_pair_8_at_position_5000_turns_by_500_radians() -> None:
    x = torch.zeros(1, 1, 512)
    x[0, 0, 448 + 16] = 1.0
    plain = rope(x, torch.tensor([5000]), frequencies(64, 10_000.0))[0, 0, 464:466].tolist()
    assert plain == pytest.approx([math.cos(500), math.sin(500)], abs=4e-5)  # half a float32 step of 500
    assert math.atan2(plain[1], plain[0]) % (2 * math.pi) == pytest.approx(3.6284, abs=1e-4)
    other = rope(x, torch.tensor([5000]), torch.tensor(released()))[0, 0, 464:466].tolist()
    assert math.dist(plain, other) > 0.1


def test_the_angle_is_a_float32_product() -> None:
    """Spec §2.4: at 10^6 the rounding of the product is visible, and part of the reference."""
    freqs, t = frequencies(64, 10_000.0), 999_999
    x = torch.zeros(1, 1, 64, dtype=F64)
    x[0, 0, 2] = 1.0
    y = rope(x, torch.tensor([t]), freqs)[0, 0, 2:4].tolist()
    f = float(freqs[1])
    assert y == pytest.approx([math.cos(f32(t * f)), math.sin(f32(t * f))], abs=1e-12)
    assert math.dist(y, [math.cos(t * f), math.sin(t * f)]) > 1e-3


def test_dims_that_are_not_rotary_pass_bit_by_bit_and_pairs_are_interleaved() -> None:
    x = generator.normal("still", (3, 2, 96)).to(BF16)
    y = rope(x, torch.tensor([5, 6, 7]), frequencies(64, 10_000.0))
    assert torch.equal(y[..., :32], x[..., :32])
    one = torch.zeros(1, 1, 8)
    one[0, 0, 4] = 1.0
    moved = rope(one, torch.tensor([1]), frequencies(4, 100.0))[0, 0].tolist()
    assert moved == pytest.approx([0, 0, 0, 0, math.cos(1), math.sin(1), 0, 0], abs=1e-7)


@pytest.mark.parametrize("position", POSITIONS)
def test_rotating_back_is_the_identity(position: int) -> None:
    x, freqs = generator.normal("back", (1, 2, 64)).double(), frequencies(64, 10_000.0)
    at = torch.tensor([position])
    assert torch.allclose(rope(rope(x, at, freqs), at, freqs, True), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shift", [1, 128, 4096])
def test_k5_scores_depend_on_distance_alone(shift: int) -> None:
    q, k = generator.normal("q", (1, 1, 64)).double(), generator.normal("k", (1, 1, 64)).double()
    freqs = frequencies(64, 10_000.0)

    def score(tq: int, tk: int) -> float:
        return float((rope(q, torch.tensor([tq]), freqs) * rope(k, torch.tensor([tk]), freqs)).sum())

    bound = 4 * (11 + shift) * 2.0**-24 * float(q.norm() * k.norm())  # four angles, each rounded to float32
    assert score(11, 4) == pytest.approx(score(11 + shift, 4 + shift), abs=bound)
    assert abs(score(11, 4) - score(11, 5)) > 100 * bound or shift == 4096


def test_no_tokens_and_int32_positions() -> None:
    freqs = frequencies(64, 10_000.0)
    assert rope(torch.zeros(0, 2, 64), torch.zeros(0, dtype=torch.int64), freqs).shape == (0, 2, 64)
    x, at = generator.normal("int", (3, 1, 64)), torch.tensor([3, 70_000, 1_000_000])
    assert torch.equal(rope(x, at.int(), freqs), rope(x, at, freqs))


def test_query_norm_rope_is_norm_then_rotation() -> None:
    q, at, freqs = generator.normal("q", (3, 2, 96)).double(), torch.tensor([0, 9, 70_000]), frequencies(64, 10_000.0)
    y = query_norm_rope(q, at, freqs, 1e-6)
    for t in range(3):
        for head in range(2):
            right = turned(rms(q[t, head].tolist(), [1.0] * 96, 1e-6), int(at[t]), freqs.tolist())
            assert close(y[t, head], right, 1e-12)
