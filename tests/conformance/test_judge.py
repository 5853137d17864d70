"""The judge rejects every planted fault, whatever the operator, and accepts what is computed right in another order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hal_ops
from hal.errors import ContractError
from hal.kernel import Kernel, kernel
from hal.operator import OPERATORS, Sample
from hal_conformance import judge, numerics
from hal_ops import formats

OPS = ("rms_norm", "linear_dense", "matmul_fp8", "sparse_attention")
Fn = Callable[..., Tensor]


def sample_of(name: str, family: str = "normal") -> Sample:
    """The quick sample of five tokens."""
    return next(s for s in OPERATORS[name].samples() if s.axes["T"] == 5 and s.family == family)


def as_kernel(name: str, fn: Callable[..., Any]) -> Kernel:
    return kernel(name)(fn)


def verdict(name: str, fn: Callable[..., Any], family: str = "normal") -> judge.Verdict:
    return judge.compare(OPERATORS[name], as_kernel(name, fn), sample_of(name, family))


def right(name: str) -> Fn:
    return OPERATORS[name].fn


def operands(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded float32 [T, K] and [N, K]."""
    return formats.dequantize_fp8(x, x_scale, 128), formats.dequantize_weight_fp8(weight, weight_scale)


def blockwise(a: Tensor, b: Tensor, step: int, dtype: torch.dtype) -> Tensor:
    """a·bᵀ over blocks of K, partial sums kept in ``dtype``."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=dtype)
    for k in range(0, a.shape[1], step):
        total = total + (a[:, k : k + step] @ b[:, k : k + step].T).to(dtype)
    return total


def mean_square(x: Tensor, step: int, dtype: torch.dtype) -> Tensor:
    """Mean of squares [T, 1] over blocks of D, partial sums kept in ``dtype``."""
    total = torch.zeros(x.shape[0], 1, dtype=dtype)
    for k in range(0, x.shape[1], step):
        total = total + x[:, k : k + step].float().square().sum(-1, keepdim=True).to(dtype)
    return total.float() / x.shape[1]


def online(dtype: torch.dtype, tile: int) -> Fn:
    """Attention by tiles with a running maximum, its output accumulated in ``dtype``."""

    def attend(q: Any, window: Any, window_rows: Any, entries: Any, entry_rows: Any, sink: Any, scale: Any) -> Tensor:
        ids = torch.cat((window_rows, torch.where(entry_rows < 0, -1, entry_rows + window.shape[0])), 1).long()
        rows = torch.cat((window, entries))[ids.clamp(min=0)].float()
        s = torch.einsum("thd,tnd->thn", q.float(), rows) * scale
        s = s.masked_fill(ids[:, None] < 0, -torch.inf)
        m, total = torch.full((*s.shape[:2], 1), -1e30), torch.zeros(*s.shape[:2], 1)
        o = torch.zeros(q.shape, dtype=dtype)
        for n in range(0, s.shape[2], tile):
            new = torch.maximum(m, s[..., n : n + tile].amax(-1, keepdim=True))
            p, shrink = (s[..., n : n + tile] - new).exp(), (m - new).exp()
            part = torch.einsum("thn,tnd->thd", p.to(q.dtype).float(), rows[:, n : n + tile])
            o, total, m = (o.float() * shrink + part).to(dtype), total * shrink + p.sum(-1, keepdim=True), new
        out: Tensor = (o.float() / (total + (sink[:, None] - m).exp())).to(q.dtype)
        return out

    return attend


def zeros(name: str) -> Fn:
    return lambda *a: torch.zeros_like(right(name)(*a))


def through_fp8(name: str) -> Fn:
    return lambda *a: right(name)(*a).float().to(torch.float8_e4m3fn).to(torch.bfloat16)


def stale_row(name: str) -> Fn:
    """The last token's row is the first one's."""

    def fn(*a: Any) -> Tensor:
        y: Tensor = right(name)(*a)
        y[-1] = y[0]
        return y

    return fn


def cut(x: Tensor) -> Tensor:
    """float32 to bfloat16 by cutting the low bits off."""
    return (x.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def truncated(name: str) -> Fn:
    """Right in float32, cut to the carrier instead of rounded."""
    return lambda *a: cut(right(name)(*(numerics.lift(v, torch.float32) for v in a)))


def dropped_block(name: str) -> Fn:
    faults: dict[str, Fn] = {
        "rms_norm": lambda x, w, eps: (
            x.float() * torch.rsqrt(mean_square(x[:, :-32], 32, torch.float32) + eps) * w
        ).to(x.dtype),
        "linear_dense": lambda x, w: right(name)(x[:, :-128], w[:, :-128]),
        "matmul_fp8": lambda x, xs, w, ws, d: right(name)(
            x[:, :-128].contiguous(), xs[:, :-1], w[:, :-128].contiguous(), ws[:, :-1], d
        ),
        "sparse_attention": lambda q, w, wr, e, er, s, c: right(name)(q, w, wr, e, er[:, :-4], s, c),
    }
    return faults[name]


def doubled_scale(name: str) -> Fn:
    """One block of an operand counts twice."""

    def twice(t: Tensor, *index: Any) -> Tensor:
        out = t.clone()
        out[index] = out[index] * 2
        return out

    faults: dict[str, Fn] = {
        "rms_norm": lambda x, w, eps: right(name)(x, twice(w, slice(0, 32)), eps),
        "linear_dense": lambda x, w: right(name)(x, twice(w, slice(0, 128), slice(128, 256))),
        "matmul_fp8": lambda x, xs, w, ws, d: right(name)(x, xs, w, twice(formats.decode_ue8m0(ws), 1, 1), d),
        "sparse_attention": lambda q, w, wr, e, er, s, c: right(name)(q, w, wr, twice(e, slice(0, 4)), er, s, c),
    }
    return faults[name]


def narrow_accumulator(name: str) -> Fn:
    """Partial sums kept in bfloat16."""
    bf16 = torch.bfloat16
    faults: dict[str, Fn] = {
        "rms_norm": lambda x, w, eps: (x.float() * torch.rsqrt(mean_square(x, 16, bf16) + eps) * w).to(bf16),
        "linear_dense": lambda x, w: blockwise(x.float(), w.float(), 64, bf16),
        "matmul_fp8": lambda x, xs, w, ws, d: blockwise(*operands(x, xs, w, ws), 64, bf16).to(d),
        "sparse_attention": online(bf16, 4),
    }
    return faults[name]


def other_order(name: str) -> Fn:
    """Right: float32 sums in another order than the reference's (split K, running softmax)."""
    f32 = torch.float32
    variants: dict[str, Fn] = {
        "rms_norm": lambda x, w, eps: (x.float() * torch.rsqrt(mean_square(x, 1, f32) + eps) * w).to(x.dtype),
        "linear_dense": lambda x, w: blockwise(x.float(), w.float(), 32, f32).to(x.dtype),
        "matmul_fp8": lambda x, xs, w, ws, d: blockwise(*operands(x, xs, w, ws), 32, f32).to(d),
        "sparse_attention": online(f32, 4),
    }
    return variants[name]


#: softmax over outliers is one row, which the carrier holds exactly: there a narrow accumulator loses nothing
HARMLESS = {("sparse_attention", narrow_accumulator, "outliers")}
FAULTS = (zeros, through_fp8, stale_row, truncated, dropped_block, doubled_scale, narrow_accumulator)


@pytest.mark.parametrize("family", ["normal", "outliers"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPS)
def test_every_planted_fault_is_rejected(name: str, fault: Callable[[str], Fn], family: str) -> None:
    found = verdict(name, fault(name), family)
    if (name, fault, family) in HARMLESS:
        assert found.ok, "no longer harmless: remove it from the list"
        return
    assert not found.ok, found
    assert found.error > found.limit
    assert found.where.startswith(("y[", "o["))


@pytest.mark.parametrize("family", ["normal", "outliers"])
@pytest.mark.parametrize("name", OPS)
def test_the_reference_and_another_order_of_summing_are_accepted(name: str, family: str) -> None:
    for fn in (lambda *a: right(name)(*a), other_order(name)):
        found = verdict(name, fn, family)
        assert found.ok, found
        assert 0 <= found.error <= found.limit


def test_a_sequential_sum_over_many_terms_is_accepted_and_a_lost_term_is_not() -> None:
    def inputs() -> tuple[Any, ...]:
        draw = hal_ops.samples.Draw("long", "positive")
        return draw.act("x", 3, 8192), draw.weight("weight", 16, 8192).abs()

    def added(x: Tensor, w: Tensor, terms: int) -> Tensor:
        return (x.float()[:, None, :terms] * w.float()[None, :, :terms]).cumsum(-1)[..., -1]

    op = OPERATORS["linear_fp32"]
    long = Sample("long", {"T": 3, "N": 16, "K": 8192}, "positive", False, inputs)
    assert judge.compare(op, as_kernel(op.name, lambda x, w: added(x, w, 8192)), long).ok
    lost = judge.compare(op, as_kernel(op.name, lambda x, w: added(x, w, 8191)), long)
    assert not lost.ok


def test_an_accumulator_of_14_bits_passes_only_where_it_is_declared() -> None:
    def coarse(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, d: torch.dtype) -> Tensor:
        a, b = operands(x, xs, w, ws)
        total = torch.zeros(a.shape[0], b.shape[0])
        for k in range(0, a.shape[1], 32):
            part = a[:, k : k + 32] @ b[:, k : k + 32].T
            total += torch.frexp(part).mantissa.mul(2.0**14).round().div(2.0**14).ldexp(torch.frexp(part).exponent)
        return total.to(d)

    op, one = OPERATORS["matmul_fp8"], sample_of("matmul_fp8")
    assert not judge.compare(op, as_kernel(op.name, coarse), one).ok
    assert judge.compare(op, as_kernel(op.name, coarse), one, numerics.PROMOTED_14_BITS).ok
    assert not judge.compare(op, as_kernel(op.name, zeros(op.name)), one, numerics.PROMOTED_14_BITS).ok


def test_exact_operators_are_compared_bit_by_bit() -> None:
    def one_code_off(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, scale = formats.quantize_fp8(x, block, dtype)
        codes.view(torch.uint8)[3, 7] ^= 1
        return codes, scale

    assert verdict("quant_act_fp8", lambda x, block, dtype: formats.quantize_fp8(x, block, dtype)).ok
    found = verdict("quant_act_fp8", one_code_off)
    assert not found.ok
    assert found.where == "codes[3, 7]"


def test_a_lost_sign_of_zero_is_a_fault_of_an_exact_operator() -> None:
    op = OPERATORS["fake_quant_fp8"]
    one = next(s for s in op.samples() if s.axes["T"] == 64 and s.family == "adversarial")
    found = judge.compare(op, as_kernel(op.name, lambda x, block: formats.fake_quantize_fp8(x, block) + 0.0), one)
    assert not found.ok


def reordered(chosen: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def fn(*a: Any) -> Tensor:
        return chosen(OPERATORS["index_topk"].fn(*a))

    return fn


def test_a_set_is_judged_by_its_scores() -> None:
    op = OPERATORS["index_topk"]
    one = next(s for s in op.samples() if s.axes["T"] == 5 and s.family == "normal")

    def swapped(*a: Any) -> Tensor:
        """The best entry gives way to the worst that was not chosen."""
        ids: Tensor = op.fn(*a)
        scores = numerics.index_scores(dict(zip(op.contract.signature.parameters, a, strict=True)), True)
        for t in range(ids.shape[0]):
            left = [j for j in range(int(a[5][t])) if j not in ids[t].tolist()]
            if left:
                best = int(ids[t][scores[t][ids[t].long()].argmax()])
                worst = min(left, key=lambda j: float(scores[t, j]))
                ids[t] = torch.tensor(sorted([worst, *(i for i in ids[t].tolist() if i != best)]))
        return ids

    assert judge.compare(op, as_kernel(op.name, reordered(lambda ids: ids)), one).ok
    assert not judge.compare(op, as_kernel(op.name, swapped), one).ok
    assert not judge.compare(op, as_kernel(op.name, reordered(lambda ids: ids.flip(1).contiguous())), one).ok
    assert not judge.compare(
        op, as_kernel(op.name, reordered(lambda ids: ids[:, :1].expand_as(ids).contiguous())), one
    ).ok


def test_routing_is_judged_by_ids_and_weights() -> None:
    op = OPERATORS["gate_topk"]
    one = next(s for s in op.samples() if s.axes["T"] == 5)

    def biased(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        """Weighs by the biased scores: the classic mistake."""
        scores = torch.nn.functional.softplus(logits).sqrt() + bias
        ids = op.fn(logits, bias, k, scale)[0]
        chosen = scores.gather(1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True) * scale

    assert judge.compare(op, as_kernel(op.name, lambda *a: op.fn(*a)), one).ok
    found = judge.compare(op, as_kernel(op.name, biased), one)
    assert not found.ok
    assert found.where.startswith("weights[")


def test_structure_is_judged_before_values() -> None:
    wrong_dtype = verdict("rms_norm", lambda x, w, eps: right("rms_norm")(x, w, eps).float())
    assert not wrong_dtype.ok
    assert "float32 [5, 96], right is bfloat16 [5, 96]" in wrong_dtype.why
    wrong_shape = verdict("rms_norm", lambda x, w, eps: right("rms_norm")(x, w, eps)[:-1])
    assert "[4, 96], right is bfloat16 [5, 96]" in wrong_shape.why


def test_a_changed_argument_is_a_fault() -> None:
    def scribbles(x: Tensor, w: Tensor, eps: float) -> Tensor:
        y = right("rms_norm")(x, w, eps)
        w[0] = 0
        return y

    found = verdict("rms_norm", scribbles)
    assert not found.ok
    assert "argument weight was changed; rms_norm writes nothing" in found.why


def test_a_kernel_that_calls_an_operator_is_rejected() -> None:
    found = verdict("linear_dense", lambda x, w: hal_ops.linear_fp32(x, w).to(x.dtype))
    assert not found.ok
    assert "calls operator linear_fp32" in found.why


def test_a_hidden_nan_is_a_fault() -> None:
    def poisoned(x: Tensor, w: Tensor, eps: float) -> Tensor:
        y = right("rms_norm")(x, w, eps)
        y[2, 3] = torch.nan
        return y

    assert not verdict("rms_norm", poisoned).ok


def test_what_an_operator_writes_is_judged() -> None:
    op = OPERATORS["write_rows"]
    one = next(s for s in op.samples() if s.axes["T"] == 5)

    def skips_the_last(pool: Tensor, rows: Tensor, values: Tensor) -> None:
        op.fn(pool, rows[:-1], values[:-1])

    assert judge.compare(op, as_kernel(op.name, lambda p, r, v: op.fn(p, r, v)), one).ok
    found = judge.compare(op, as_kernel(op.name, skips_the_last), one)
    assert not found.ok
    assert found.where.startswith("pool (written)[")


def test_run_judges_what_is_claimed_and_nothing_else() -> None:
    good = as_kernel("hadamard", lambda x: OPERATORS["hadamard"].fn(x))
    found = judge.run({"hadamard": (good,)}, ops=["hadamard"])
    assert len(found) == len([s for s in OPERATORS["hadamard"].samples() if not s.full])
    assert all(v.ok and v.kernel == good.name for v in found)
    elsewhere = replace(good, claim=replace(good.claim, arch=("other",)))
    assert judge.run({"hadamard": (elsewhere,)}, arch="this") == []
    assert judge.run({"hadamard": (good,)}, ops=["rms_norm"]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_ulp_is_the_largest_error_of_one_rounding(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([1.0, 1.5, 1.999, -3.0, 1e-3, tiny, tiny / 3, 0.0], dtype=torch.float64)
    here = x.to(dtype)
    gap = torch.nextafter(here.abs(), torch.tensor(torch.inf, dtype=dtype)) if dtype == torch.float32 else None
    limit = numerics.half_ulp(x, dtype)
    assert bool(((here.double() - x).abs() <= limit).all())
    if gap is not None:
        exact = here.double() == x
        assert bool(((gap.double() - here.double().abs()) / 2 == limit)[exact].all())


def test_lift_widens_carriers_and_leaves_codes_and_scales() -> None:
    codes = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
    scale = torch.ones(1, 1).to(torch.float8_e8m0fnu)
    weight = numerics.lift(hal_ops.Weight(codes, scale, "fp8"), torch.float64)
    assert (weight.data.dtype, weight.scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert numerics.lift(torch.ones(1, dtype=torch.bfloat16), torch.float32).dtype == torch.float32
    assert numerics.lift(torch.ones(1, dtype=torch.float64), torch.float32).dtype == torch.float64
    assert numerics.lift(torch.bfloat16, torch.float64) == torch.float64
    assert numerics.lift(torch.float8_e4m3fn, torch.float64) == torch.float8_e4m3fn


def test_a_reduction_that_names_no_axis_is_refused() -> None:
    op = OPERATORS["linear_dense"]
    call = op.contract.call(sample_of("linear_dense").make(), {})
    assert numerics.reduction("K", call) == 256
    with pytest.raises(ContractError, match="reduction 'Z'"):
        numerics.reduction("Z", call)
