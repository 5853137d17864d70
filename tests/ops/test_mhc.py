"""Hyper-connections against loops in plain Python (spec §2.2, §2.9, A.5; fault B15; kind K10)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hal_ops import generator, hc_enter, hc_head, hc_mix, hc_post, hc_pre

BF16, F64 = torch.bfloat16, torch.float64
Matrix = list[list[float]]
B15: Matrix = [[4, 0, 0, 0], [3, 1, 0, 0], [0, 0, 2, -6], [1, -1, 5, 0]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(row: list[float]) -> list[float]:
    e = [math.exp(v - max(row)) for v in row]
    return [v / math.fsum(e) for v in e]


def rows_first(c: Matrix, eps: float) -> Matrix:
    return [[v / (math.fsum(row) + eps) for v in row] for row in c]


def columns(c: Matrix, eps: float) -> Matrix:
    return [list(r) for r in zip(*rows_first([list(r) for r in zip(*c, strict=True)], eps), strict=True)]


def sinkhorn(logits: Matrix, rounds: int, eps: float = 1e-6) -> Matrix:
    """Row softmax plus eps and columns, then rounds − 1 times rows and columns."""
    c = columns([[v + eps for v in softmax(row)] for row in logits], eps)
    for _ in range(rounds - 1):
        c = columns(rows_first(c, eps), eps)
    return c


def mixes(streams: Tensor, fn: Tensor, eps: float) -> list[float]:
    v = streams.flatten().tolist()
    rho = 1 / math.sqrt(math.fsum(x * x for x in v) / len(v) + eps)
    return [math.fsum(a * b for a, b in zip(v, row, strict=True)) * rho for row in fn.tolist()]


def split(
    mix: list[float], scale: list[float], base: list[float], rounds: int
) -> tuple[list[float], list[float], Matrix]:
    pre = [sigmoid(mix[j] * scale[0] + base[j]) + 1e-6 for j in range(4)]
    post = [2 * sigmoid(mix[4 + j] * scale[1] + base[4 + j]) for j in range(4)]
    logits = [[mix[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k] for k in range(4)] for j in range(4)]
    return pre, post, sinkhorn(logits, rounds)


def given(mix: list[float], scale: list[float], base: list[float], rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """``hc_mix`` on streams whose mixes are exactly ``mix``: four ones, so that the norm is 1."""
    fn = torch.zeros(24, 4, dtype=F64)
    fn[:, 0] = torch.tensor(mix, dtype=F64)
    streams = torch.ones(1, 4, 1, dtype=F64)
    return hc_mix(streams, fn, torch.tensor(scale).double(), torch.tensor(base).double(), 0.0, 1e-6, rounds)


def comb_of(logits: Matrix, rounds: int, dtype: torch.dtype = torch.float32) -> Tensor:
    base = torch.tensor([0.0] * 8 + [v for row in logits for v in row], dtype=dtype)
    zeros = torch.zeros(24, 8, dtype=dtype)
    return hc_mix(torch.ones(1, 4, 2, dtype=dtype), zeros, torch.ones(3, dtype=dtype), base, 1e-6, 1e-6, rounds)[2][0]


def parameters(dim: int, rows: int, scales: int, key: str = "p") -> tuple[Tensor, Tensor, Tensor]:
    fn = generator.normal(f"{key}/fn", (rows, 4 * dim)).double() * (4 * dim) ** -0.5
    scale = generator.normal(f"{key}/scale", (scales,)).double() * 0.1 + 1
    return fn, scale, generator.normal(f"{key}/base", (rows,)).double() * 0.3


def test_mhc_split_unit_vector() -> None:
    """Spec A.5."""
    mix = [0.5, -0.25, 1, 0, 0.1, 0.2, -0.3, 0.4] + [(7 * i % 16) / 8 - 1 for i in range(16)]
    pre, post, comb = given(mix, [1, 0.5, 2], [0.01 * i for i in range(24)], 20)
    assert pre[0].tolist() == pytest.approx([0.6224604, 0.4402873, 0.7349736, 0.5075005], abs=1.2e-7)
    assert post[0].tolist() == pytest.approx([1.0449697, 1.0748596, 0.9550303, 1.1341858], abs=1.2e-7)
    right = [[0.0408100, 0.1300682, 0.6990525, 0.1300685], [0.6990522, 0.0408092, 0.2193281, 0.0408096]]
    right += [[0.1300684, 0.4145608, 0.0408093, 0.4145605], [0.1300685, 0.4145608, 0.0408093, 0.4145605]]
    assert comb[0].flatten().tolist() == pytest.approx([v for row in right for v in row], abs=2e-7)


@pytest.mark.parametrize(
    ("rounds", "first"),
    [
        (1, [0.50367, 0.07362, 0.00955, 0.26917]),
        (2, [0.62483, 0.09766, 0.00859, 0.35777]),
        (5, [0.60624, 0.08322, 0.00579, 0.32159]),
        (20, [0.60031, 0.08026, 0.00544, 0.31400]),
    ],
)
def test_b15_rounds_of_sinkhorn(rounds: int, first: list[float]) -> None:
    assert comb_of(B15, rounds)[0].tolist() == pytest.approx(first, abs=6e-6)
    seen = comb_of(B15, rounds, F64).flatten().tolist()
    assert seen == pytest.approx([v for row in sinkhorn(B15, rounds) for v in row], abs=1e-14)


def test_b15_sums_are_one_after_20_rounds_and_extremes_stay_finite() -> None:
    comb = comb_of(B15, 20)
    assert comb.sum(0).tolist() == pytest.approx([1] * 4, abs=2e-6)
    assert comb.sum(1).tolist() == pytest.approx([1] * 4, abs=2e-6)
    for logits in ([[40 * v for v in row] for row in B15], [[1e4 * (i == j) for j in range(4)] for i in range(4)]):
        wild = comb_of(logits, 20)
        assert bool(wild.isfinite().all())
        assert wild.sum(0).tolist() == pytest.approx([1] * 4, abs=2e-6)
        assert wild.flatten().tolist() == pytest.approx([v for row in sinkhorn(logits, 20) for v in row], abs=2e-6)


@pytest.mark.parametrize("rounds", [1, 3, 20])
def test_hc_mix_is_the_formula(rounds: int) -> None:
    streams, (fn, scale, base) = generator.normal("x", (3, 4, 6)).double(), parameters(6, 24, 3)
    seen = hc_mix(streams, fn, scale, base, 1e-6, 1e-6, rounds)
    for t in range(3):
        pre, post, comb = split(mixes(streams[t], fn, 1e-6), scale.tolist(), base.tolist(), rounds)
        assert seen[0][t].tolist() == pytest.approx(pre, abs=1e-13)
        assert seen[1][t].tolist() == pytest.approx(post, abs=1e-13)
        assert seen[2][t].flatten().tolist() == pytest.approx([v for row in comb for v in row], abs=1e-13)


def test_hc_mix_of_a_bf16_stream_is_computed_in_float32() -> None:
    streams, (fn, scale, base) = generator.normal("x", (3, 4, 96)).to(BF16), parameters(96, 24, 3)
    narrow = hc_mix(streams, fn.float(), scale.float(), base.float(), 1e-6, 1e-6, 20)
    wide = hc_mix(streams.double(), fn, scale, base, 1e-6, 1e-6, 20)
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a.double(), b, rtol=0, atol=4e-6)


def test_one_token_and_no_token() -> None:
    """B15: a single decoded token works, and equals the same token among others."""
    streams, rest = generator.normal("x", (5, 4, 6)).double(), (*parameters(6, 24, 3), 1e-6, 1e-6, 20)
    for whole, one in zip(hc_mix(streams, *rest), hc_mix(streams[2:3], *rest), strict=True):
        assert torch.allclose(whole[2:3], one, rtol=0, atol=1e-15)
    assert [tuple(o.shape) for o in hc_mix(streams[:0], *rest)] == [(0, 4), (0, 4), (0, 4, 4)]


def test_hc_pre_collapses_by_weight() -> None:
    streams, pre = generator.normal("x", (2, 4, 5)).double(), generator.uniform("pre", (2, 4)).double()
    right = [[math.fsum(float(pre[t, m] * streams[t, m, i]) for m in range(4)) for i in range(5)] for t in range(2)]
    assert hc_pre(streams, pre).tolist() == [pytest.approx(r, abs=1e-14) for r in right]


def test_hc_post_sums_over_the_first_index() -> None:
    """Pitfall V5: with one entry comb[0, 2] stream 0 flows into stream 2, not the other way round."""
    streams = torch.arange(1.0, 5.0, dtype=F64).view(1, 4, 1)
    comb = torch.zeros(1, 4, 4, dtype=F64)
    comb[0, 0, 2] = 1.0
    out = hc_post(torch.tensor([[10.0]]).double(), streams, torch.tensor([[0.0, 0.0, 0.5, 2.0]]).double(), comb)
    assert out.flatten().tolist() == [0, 0, 0.5 * 10 + 1, 20]


def test_hc_post_is_the_formula() -> None:
    y, streams = generator.normal("y", (2, 5)).double(), generator.normal("x", (2, 4, 5)).double()
    post, comb = generator.uniform("post", (2, 4)).double(), generator.uniform("comb", (2, 4, 4)).double()
    out = hc_post(y, streams, post, comb)
    for t in range(2):
        for n in range(4):
            for i in range(5):
                terms = [float(comb[t, m, n] * streams[t, m, i]) for m in range(4)]
                assert float(out[t, n, i]) == pytest.approx(float(post[t, n] * y[t, i]) + math.fsum(terms), abs=1e-14)


def test_k10_43_layers_of_mixing_keep_the_streams_bounded() -> None:
    """Columns of comb sum to one, so every new stream is a mean of the old ones."""
    streams, nothing = generator.normal("x", (4, 4, 32)), torch.zeros(4, 32)
    top = float(streams.abs().max())
    for layer in range(43):
        fn, scale, base = parameters(32, 24, 3, f"layer{layer}")
        comb = hc_mix(streams, fn.float(), scale.float(), base.float() * 10, 1e-6, 1e-6, 20)[2]
        streams = hc_post(nothing, streams, torch.zeros(4, 4), comb)
        assert float(streams.abs().max()) <= top * 1.0001
    assert float(streams.abs().max()) > 0.01


def test_hc_head_has_one_scale_and_no_mixing() -> None:
    streams, (fn, scale, base) = generator.normal("x", (3, 4, 6)).double(), parameters(6, 4, 1)
    u = hc_head(streams, fn, scale, base, 1e-6, 1e-6)
    for t in range(3):
        mix = mixes(streams[t], fn, 1e-6)
        pre = [sigmoid(m * float(scale[0]) + b) + 1e-6 for m, b in zip(mix, base.tolist(), strict=True)]
        right = [math.fsum(pre[m] * float(streams[t, m, i]) for m in range(4)) for i in range(6)]
        assert u[t].tolist() == pytest.approx(right, abs=1e-13)


def test_hc_enter_mixes_collapses_and_norms() -> None:
    streams, (fn, scale, base) = generator.normal("x", (2, 4, 6)).double(), parameters(6, 24, 3)
    norm = generator.normal("n", (6,)).double() * 0.1 + 1
    x, post, comb = hc_enter(streams, fn, scale, base, norm, 1e-6, 1e-6, 20)
    for t in range(2):
        pre, right_post, right_comb = split(mixes(streams[t], fn, 1e-6), scale.tolist(), base.tolist(), 20)
        u = [math.fsum(pre[m] * float(streams[t, m, i]) for m in range(4)) for i in range(6)]
        rho = 1 / math.sqrt(math.fsum(v * v for v in u) / 6 + 1e-6)
        assert x[t].tolist() == pytest.approx([v * rho * w for v, w in zip(u, norm.tolist(), strict=True)], abs=1e-13)
        assert post[t].tolist() == pytest.approx(right_post, abs=1e-13)
        assert comb[t].flatten().tolist() == pytest.approx([v for row in right_comb for v in row], abs=1e-13)
