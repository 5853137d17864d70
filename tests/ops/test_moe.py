"""Routing, clamped SwiGLU and grouped experts against loops in plain Python (spec §2.8; B09, B10, B16, B74, B76; K4, K9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hal.errors import InputError
from hal_ops import (
    Weight,
    formats,
    gate_hash,
    gate_topk,
    generator,
    grouped_matmul_dense,
    grouped_matmul_fp4,
    grouped_matmul_fp8,
    grouped_matmul_int8,
    moe_combine,
    moe_experts,
    moe_sort,
    shared_expert,
    swiglu,
)
from hal_ops.moe import check_token_ids

BF16, F64 = torch.bfloat16, torch.float64
FN = torch.float8_e4m3fn
FORMATS = pytest.mark.parametrize("form", ["dense", "fp8", "fp4", "int8"])


def score(z: float) -> float:
    """sqrt(softplus(z)), linear above 20."""
    return math.sqrt(z if z > 20 else math.log1p(math.exp(z)))


def silu(g: float) -> float:
    return g / (1 + math.exp(-g)) if g > -700 else 0.0


def act(gate: float, up: float, limit: float, weight: float = 1.0) -> float:
    if limit:
        gate, up = min(gate, limit), max(-limit, min(limit, up))
    return silu(gate) * up * weight


def matvec(w: Tensor, x: list[float]) -> list[float]:
    return [math.fsum(a * b for a, b in zip(row, x, strict=True)) for row in w.tolist()]


# Routing ------------------------------------------------------------------------------------------------------------


def test_router_score_unit_vector() -> None:
    """Spec A.5, through the gate: with one expert chosen twice as likely, weights are the scores over their sum."""
    logits = torch.tensor([[-5.0, 0.0, 1.0, 25.0]])
    ids, weights = gate_topk(logits, torch.zeros(4), 4, 1.0)
    right = {0: 0.0819472, 1: 0.8325546, 2: 1.1459763, 3: 5.0}
    assert ids[0].tolist() == [3, 2, 1, 0]
    assert weights[0].tolist() == pytest.approx([right[i] / sum(right.values()) for i in ids[0].tolist()], rel=1e-6)


def test_b16_the_bias_selects_and_does_not_weigh() -> None:
    bias = torch.zeros(8)
    bias[3] = 1.0
    ids, weights = gate_topk(torch.tensor([[2, 1.9, 1, 0, -1, -3, -8, -20]]), bias, 2, 1.5)
    assert ids[0].tolist() == [3, 0]
    assert weights[0].tolist() == pytest.approx([0.54511, 0.95489], abs=5e-6)


def test_ties_go_to_the_lower_expert() -> None:
    ids, weights = gate_topk(torch.zeros(2, 300), torch.zeros(300), 6, 1.5)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert weights.flatten().tolist() == pytest.approx([0.25] * 12)
    bias = torch.zeros(300)
    bias[[7, 290]] = 0.5
    assert gate_topk(torch.zeros(1, 300), bias, 3, 1.0)[0].tolist() == [[7, 290, 0]]


def test_k4_logits_from_minus_200_to_200_route_finitely() -> None:
    logits = torch.linspace(-200, 200, 401)[None]
    ids, weights = gate_topk(logits, torch.zeros(401), 6, 2.5)
    assert ids[0].tolist() == [400, 399, 398, 397, 396, 395]
    right = [math.sqrt(z) for z in range(200, 194, -1)]
    assert weights[0].tolist() == pytest.approx([2.5 * r / sum(right) for r in right], rel=1e-6)


@pytest.mark.parametrize("experts", [8, 256, 384])
def test_gate_topk_is_the_formula(experts: int) -> None:
    logits, bias = generator.normal("l", (9, experts)).double() * 4, generator.normal("b", (experts,)).double()
    ids, weights = gate_topk(logits, bias, 6, 1.5)
    for t in range(9):
        s = [score(z) for z in logits[t].tolist()]
        chosen = sorted(range(experts), key=lambda e: (-(s[e] + float(bias[e])), e))[:6]
        assert ids[t].tolist() == chosen
        assert weights[t].tolist() == pytest.approx([1.5 * s[e] / math.fsum(s[c] for c in chosen) for e in chosen])


def test_gate_hash_takes_the_experts_of_the_token_and_weighs_by_score() -> None:
    table = torch.tensor([[(7 * t + 3 * k + 1) % 8 for k in range(2)] for t in range(50)])
    logits, tokens = generator.normal("l", (5, 8)).double(), torch.tensor([0, 49, 7, 7, 13])
    ids, weights = gate_hash(logits, tokens, table, 1.5)
    for t in range(5):
        chosen = [(7 * int(tokens[t]) + 3 * k + 1) % 8 for k in range(2)]
        s = [score(float(logits[t, e])) for e in chosen]
        assert ids[t].tolist() == chosen
        assert weights[t].tolist() == pytest.approx([1.5 * v / sum(s) for v in s])
    assert ids.dtype == torch.int64
    assert torch.equal(gate_hash(logits, tokens.int(), table.int(), 1.5)[0], ids)


@pytest.mark.parametrize(("token", "fits"), [(-1, False), (0, True), (99, True), (100, False), (129_280, False)])
def test_b74_token_ids_outside_the_vocabulary_are_refused_before_they_index(token: int, fits: bool) -> None:
    ids = torch.tensor([3, token, 5])
    if fits:
        check_token_ids(ids, 100)
    else:
        with pytest.raises(InputError, match=f"token id {token} is outside the vocabulary, right is 0 to 99"):
            check_token_ids(ids, 100)
    check_token_ids(ids[:0], 100)


# Activation ---------------------------------------------------------------------------------------------------------


def test_b09_the_clamp_is_one_sided_on_the_gate() -> None:
    pairs = torch.tensor([[12.0, -15.0], [-30.0, 2.0], [9.0, 4.0]])
    seen = swiglu(pairs, 10.0).flatten().tolist()
    assert seen == pytest.approx([-99.9955, -5.6e-12, 35.996], rel=5e-3)
    assert seen[0] == pytest.approx(-99.9955, abs=5e-5)
    assert swiglu(pairs, 0.0)[0].item() == pytest.approx(-179.9989, abs=5e-5)


@pytest.mark.parametrize("limit", [0.0, 10.0])
def test_swiglu_is_the_formula_with_the_weight_before_the_rounding(limit: float) -> None:
    x, w = generator.normal("gu", (4, 12)).double() * 12, generator.uniform("w", (4,)).double()
    for weights in (None, w):
        y = swiglu(x, limit, weights)
        for t in range(4):
            row, factor = x[t].tolist(), 1.0 if weights is None else float(w[t])
            right = [act(g, u, limit, factor) for g, u in zip(row[:6], row[6:], strict=True)]
            assert y[t].tolist() == pytest.approx(right, rel=1e-12)
    narrow = swiglu(x.to(BF16), limit, w.float())
    assert torch.equal(narrow, swiglu(x.to(BF16).float(), limit, w.float()).to(BF16))


def test_swiglu_of_extremes_is_finite() -> None:
    x = torch.tensor([[-3e38, 3e38, 3e38, -3e38]])
    assert swiglu(x, 10.0).tolist() == [[0.0, pytest.approx(-99.9955, abs=1e-4)]]


# Sorting and combining ----------------------------------------------------------------------------------------------


def test_moe_sort_groups_pairs_by_expert_tokens_ascending() -> None:
    ids = generator.integers("ids", (13, 3), 0, 5)
    order, offsets = moe_sort(ids, 7)
    flat = ids.flatten().tolist()
    assert order.tolist() == sorted(range(39), key=lambda p: (flat[p], p))
    assert offsets.tolist() == [sum(e < edge for e in flat) for edge in range(8)]


@pytest.mark.parametrize(("ids", "offsets"), [([[2, 2], [2, 2]], [0, 0, 0, 4, 4]), ([], [0, 0, 0, 0, 0])])
def test_k9_one_expert_owns_all_or_nobody_owns_anything(ids: list[list[int]], offsets: list[int]) -> None:
    order, seen = moe_sort(torch.tensor(ids, dtype=torch.int64).view(-1, 2), 4)
    assert order.tolist() == list(range(2 * len(ids)))
    assert seen.tolist() == offsets


def test_combine_adds_in_ascending_expert_order() -> None:
    """(1e8 + 1) − 1e8 is 0 in float32; any other order of these three gives 1."""
    ids = torch.tensor([[4, 0, 2]])
    order, _ = moe_sort(ids, 5)
    of_expert = {0: 1e8, 2: 1.0, 4: -1e8}
    rows = torch.tensor([[of_expert[int(ids.flatten()[p])]] for p in order.tolist()])
    assert moe_combine(rows, order, 1).tolist() == [[0.0]]


def test_combine_gives_every_token_its_own_rows() -> None:
    ids = generator.integers("ids", (7, 3), 0, 4)
    order, _ = moe_sort(ids, 4)
    rows = generator.normal("rows", (21, 5)).double()
    seen = moe_combine(rows, order, 7)
    for t in range(7):
        mine = [i for i, p in enumerate(order.tolist()) if p // 3 == t]
        assert seen[t].tolist() == pytest.approx(rows[mine].sum(0).tolist(), abs=1e-14)
    assert moe_combine(rows[:0].to(BF16), order[:0], 0).shape == (0, 5)


# Grouped linears ----------------------------------------------------------------------------------------------------


def grouped_case(form: str, counts: tuple[int, ...]) -> tuple[Tensor, Callable[[], Tensor]]:
    """Right rows [R, N] in double precision, and the operator on the same operands with a float64 result."""
    experts, rows, n, k = len(counts), sum(counts), 6, 128
    x, w = generator.normal("x", (rows, k)), generator.normal("w", (experts, n, k))
    offsets = torch.tensor([sum(counts[:e]) for e in range(experts + 1)])
    run: Callable[[], Tensor]
    if form == "dense":
        a, b = x.double(), w.double()
        run = partial(grouped_matmul_dense, a, b, offsets)
    elif form == "int8":
        (cx, sx), (cw, sw) = formats.quantize_int8(x), formats.quantize_int8(w)
        a, b = cx.double() * sx.double(), cw.double() * sw.double()
        run = partial(grouped_matmul_int8, cx, sx, cw, sw[..., 0].contiguous(), offsets, F64)
    elif form == "fp8":
        cx, sx = formats.quantize_fp8(x, 128)
        cw, sw = formats.encode_e4m3(w, FN), torch.exp2(generator.integers("s", (experts, 1, 1), -4, 4).double())
        a = formats.dequantize_fp8(cx, sx, 128).double()
        b = formats.decode_e4m3(cw).double() * sw
        run = partial(grouped_matmul_fp8, cx, sx, cw, formats.encode_ue8m0(sw), offsets, F64)
    else:
        cx, sx = formats.quantize_fp8(x, 128)
        cw, s4 = formats.quantize_fp4(w)
        a = formats.dequantize_fp8(cx, sx, 128).double()
        b = formats.dequantize_weight_fp4(cw, s4).double()
        run = partial(grouped_matmul_fp4, cx, sx, cw, s4, offsets, F64)
    owner = [e for e, c in enumerate(counts) for _ in range(c)]
    right = [matvec(b[e], a[r].tolist()) for r, e in enumerate(owner)]
    return torch.tensor(right, dtype=F64).view(rows, n), run


@pytest.mark.parametrize("counts", [(0, 5, 0, 0, 3, 0, 0, 0), (0,) * 8, (4,), (1, 0, 0, 1)])
@FORMATS
def test_b76_experts_without_rows_leave_no_garbage(form: str, counts: tuple[int, ...]) -> None:
    right, run = grouped_case(form, counts)
    seen = run()
    assert seen.shape == right.shape
    assert torch.allclose(seen, right, rtol=1e-12, atol=1e-12)
    assert torch.equal(run(), seen)


# Whole experts ------------------------------------------------------------------------------------------------------

D, I, E = 128, 128, 5  # noqa: E741


def weight(form: str, key: str, *shape: int) -> tuple[Weight, Tensor]:
    """A weight in a stored format, and its values in double precision."""
    w = generator.normal(key, shape) * shape[-1] ** -0.5
    if form == "dense":
        return Weight(w.double()), w.double()
    if form == "int8":
        codes, scale = formats.quantize_int8(w)
        return Weight(codes, scale[..., 0].contiguous(), "int8"), codes.double() * scale.double()
    if form == "fp4":
        packed, scale = formats.quantize_fp4(w)
        return Weight(packed, scale, "fp4", True), formats.dequantize_weight_fp4(packed, scale).double()
    codes = formats.encode_e4m3(w * 16, FN)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return Weight(codes, formats.encode_ue8m0(torch.full(blocks, 2.0**-4)), "fp8", True), formats.decode_e4m3(
        codes
    ).double() / 16


def quantised(row: list[float], form: str) -> list[float]:
    """What a linear in this format multiplies: the row rounded as the format's activations are."""
    x = torch.tensor(row, dtype=F64)[None]
    if form in ("fp8", "fp4"):
        values: list[float] = formats.fake_quantize_fp8(x, 128)[0].tolist()
        return values
    if form == "int8":
        codes, scale = formats.quantize_int8(x)
        return (codes.double() * scale.double())[0].tolist()
    return row


def expert(row: list[float], w13: Tensor, w2: Tensor, form: str, limit: float, factor: float = 1.0) -> list[float]:
    both = matvec(w13, quantised(row, form))
    hidden = [act(g, u, limit, factor) for g, u in zip(both[:I], both[I:], strict=True)]
    return matvec(w2, quantised(hidden, form))


@FORMATS
def test_moe_experts_is_one_expert_after_another(form: str) -> None:
    """The weight enters before the second linear, so before the rounding of its input."""
    x = generator.normal("x", (3, D)).double() * 8
    ids, weights = torch.tensor([[4, 1], [1, 0], [1, 4]]), generator.uniform("rw", (3, 2)).double() + 0.1
    (w13, v13), (w2, v2) = weight(form, "w13", E, 2 * I, D), weight(form, "w2", E, D, I)
    seen = moe_experts(x, ids, weights, w13, w2, 10.0)
    for t in range(3):
        parts = [
            expert(x[t].tolist(), v13[e], v2[e], form, 10.0, float(weights[t, k]))
            for k, e in enumerate(ids[t].tolist())
        ]
        assert seen[t].tolist() == pytest.approx([sum(p) for p in zip(*parts, strict=True)], rel=1e-9, abs=1e-9)


@FORMATS
def test_b09_b10_the_shared_expert_clamps_as_the_routed_ones_do(form: str) -> None:
    x = generator.normal("x", (2, D)).double() * 20
    (w13, v13), (w2, v2) = weight(form, "s13", 2 * I, D), weight(form, "s2", D, I)
    clamped, free = shared_expert(x, w13, w2, 10.0), shared_expert(x, w13, w2, 0.0)
    for t in range(2):
        right = expert(x[t].tolist(), v13, v2, form, 10.0)
        unclamped = expert(x[t].tolist(), v13, v2, form, 0.0)
        assert clamped[t].tolist() == pytest.approx(right, rel=1e-9, abs=1e-9)
        assert free[t].tolist() == pytest.approx(unclamped, rel=1e-9, abs=1e-9)
        assert right != pytest.approx(unclamped, rel=1e-3)


@FORMATS
def test_a_routed_expert_of_weight_one_is_the_shared_expert(form: str) -> None:
    x = generator.normal("x", (4, D)).to(BF16)
    (w13, _), (w2, _) = weight(form, "s13", 2 * I, D), weight(form, "s2", D, I)
    if form == "dense":
        w13, w2 = Weight(w13.data.to(BF16)), Weight(w2.data.to(BF16))

    def stacked(w: Weight) -> Weight:
        return Weight(w.data[None], None if w.scale is None else w.scale[None], w.format, w.quantised_act)

    ids, ones = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    routed = moe_experts(x, ids, ones, stacked(w13), stacked(w2), 10.0)
    assert torch.equal(routed.to(BF16), shared_expert(x, w13, w2, 10.0))


@FORMATS
def test_k9_no_tokens(form: str) -> None:
    (w13, _), (w2, _) = weight(form, "w13", E, 2 * I, D), weight(form, "w2", E, D, I)
    none = torch.zeros(0, 2, dtype=torch.int64)
    if form == "dense":
        w13, w2 = Weight(w13.data.to(BF16)), Weight(w2.data.to(BF16))
    seen = moe_experts(torch.zeros(0, D, dtype=BF16), none, torch.zeros(0, 2), w13, w2, 10.0)
    assert seen.shape == (0, D)
    assert seen.dtype == torch.float32


def test_a_token_keeps_its_bits_whatever_shares_the_batch() -> None:
    """K13 for the reference: routing of other tokens does not matter."""
    (w13, _), (w2, _) = weight("fp4", "w13", E, 2 * I, D), weight("fp4", "w2", E, D, I)
    x, ids = generator.normal("x", (9, D)).to(BF16), generator.integers("ids", (9, 2), 0, E)
    ids[:, 1] = (ids[:, 0] + 1) % E
    weights = generator.uniform("w", (9, 2))
    whole = moe_experts(x, ids, weights, w13, w2, 10.0)
    flipped = moe_experts(x.flip(0), ids.flip(0), weights.flip(0), w13, w2, 10.0).flip(0)
    assert torch.allclose(whole, flipped, rtol=0, atol=2**-7)


def test_a_quantised_weight_without_scale_is_refused() -> None:
    bare = Weight(torch.zeros(E, 2 * I, D, dtype=FN), None, "fp8")
    with pytest.raises(InputError, match="weight of format fp8 has no scale"):
        moe_experts(
            torch.zeros(1, D, dtype=BF16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), bare, bare, 10.0
        )
