"""Every CPU kernel on every quick sample inside its claim is right; outside it refuses with a code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.errors import InputError
from hal.kernel import Kernel
from hal.operator import OPERATORS
from hal_conformance import judge
from hal_conformance.numerics import lift
from hal_cpu.features import cpu_features
from hal_cpu.kernels import KERNELS, attention, common, linear, quant
from hal_cpu.kernels.native import NATIVE
from hal_ops import formats, generator
from hal_ops.samples import Draw

ARCH = cpu_features().arch
KERNEL = {k.operator: k for k in KERNELS}
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
every_kernel = pytest.mark.parametrize("k", KERNELS, ids=lambda k: k.operator)


def reasons(k: Kernel, args: tuple[Any, ...]) -> set[str]:
    return {r.code for r in k.reasons(OPERATORS[k.operator].contract.call(args, {}), ARCH)}


def claimed(k: Kernel) -> tuple[Any, ...]:
    """Arguments of the smallest quick sample with tokens that the kernel claims."""
    samples = (s for s in OPERATORS[k.operator].samples() if not s.full and 0 not in (s.axes.get(a) for a in "TRB"))
    drawn = (s.make() for s in sorted(samples, key=lambda s: math.prod(max(1, n) for n in s.axes.values())))
    return next(args for args in drawn if not reasons(k, args))


def same(a: Any, b: Any) -> bool:
    """Same dtypes, shapes and bits, of one tensor or of several."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    wide = BITS[a.dtype.itemsize]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(wide), b.reshape(-1).view(wide))


def agree(name: str, *args: Any) -> bool:
    """Whether kernel and reference give the same bits."""
    return same(KERNEL[name].fn(*args), OPERATORS[name].reference(*args))


@every_kernel
def test_every_quick_sample_is_right_or_refused_with_a_code(k: Kernel) -> None:
    op, judged = OPERATORS[k.operator], 0
    for sample in op.samples():
        if sample.full:
            continue
        args = sample.make()
        codes = reasons(k, args)
        if codes:
            assert codes == {"axis-too-small"}, (sample.id, codes)
            continue
        verdict = judge.compare(op, k, replace(sample, make=partial(tuple, args)))
        assert verdict.ok, verdict
        judged += 1
    assert judged


def test_there_is_one_kernel_for_an_operator() -> None:
    assert len(KERNEL) == len(KERNELS)


@every_kernel
def test_double_precision_is_refused(k: Kernel) -> None:
    args = tuple(lift(a, torch.float64) for a in claimed(k))
    assert reasons(k, args) == {"dtype"}


@every_kernel
def test_strided_arguments_are_refused(k: Kernel) -> None:
    args = claimed(k)
    spread = torch.stack((args[0].reshape(-1).view(BITS[args[0].dtype.itemsize]),) * 2, -1)[:, 0]
    assert reasons(k, (spread.view(args[0].dtype).view(args[0].shape), *args[1:])) == {"layout"}


@pytest.mark.parametrize("name", ["linear_dense", "lm_head", "grouped_linear", "grouped_matmul_dense"])
def test_a_float32_weight_is_left_to_the_reference(name: str) -> None:
    args = claimed(KERNEL[name])
    assert reasons(KERNEL[name], (args[0], args[1].float(), *args[2:])) == {"dtype"}


def test_codes_of_refusals_that_samples_do_not_reach() -> None:
    x = torch.ones(2, 96, dtype=torch.bfloat16)
    assert reasons(KERNEL["fake_quant_fp8"], (x, 64)) == {"block-size"}
    assert reasons(KERNEL["fake_quant_fp4"], (x, 0)) == {"block-size"}
    assert reasons(KERNEL["hadamard"], (x,)) == {"power-of-two"}
    assert reasons(KERNEL["hadamard"], (x.new_ones(2, 512),)) == {"axis-too-large"}
    scale = torch.ones(2, 1).to(torch.float8_e8m0fnu)
    codes = torch.ones(2, 96).to(torch.float8_e4m3fn)
    assert reasons(KERNEL["matmul_fp8"], (codes, scale, codes, scale[:1], torch.bfloat16)) == {"axis-multiple"}


def awkward(dtype: torch.dtype) -> Tensor:
    """[R, 128] of ``dtype``: every bf16 bit pattern that is finite, at every scale, and ties, zeros and subnormals."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    patterns = patterns[patterns.isfinite() & (patterns.abs() < 1e37)]
    mixed = patterns[generator.permutation("cpu/awkward", patterns.numel())]
    halves = torch.arange(-512, 512) / 4  # midpoints of both formats
    ties = torch.cat([halves * 2.0**n for n in (-20, -9, -3, 0, 6)]).to(dtype)
    both = torch.cat((patterns, mixed, ties))
    return both[: both.numel() // 128 * 128].view(-1, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_fake_quantisation_has_the_references_bits_on_every_pattern(dtype: torch.dtype, block: int) -> None:
    x = awkward(dtype)
    assert agree("fake_quant_fp8", x, block)
    assert agree("fake_quant_fp4", x, block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codes", FP8)
def test_quantised_activations_have_the_references_bits_in_both_dialects(
    dtype: torch.dtype, codes: torch.dtype
) -> None:
    assert agree("quant_act_fp8", awkward(dtype), 128, codes)
    noise = generator.normal("cpu/noise", (64, 512)) * torch.exp2(
        generator.integers("cpu/power", (64, 1), -30, 30).float()
    )
    assert agree("quant_act_fp8", noise.to(dtype), 128, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_activations_have_the_references_bits(dtype: torch.dtype) -> None:
    assert agree("quant_act_int8", awkward(dtype))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["fake_quant_fp8", "fake_quant_fp4"])
def test_a_block_that_no_scale_fits_is_refused_in_words(name: str, bad: float) -> None:
    x = torch.ones(3, 128)
    x[1, 5] = bad
    with pytest.raises(InputError, match="NaN or infinity"):
        KERNEL[name].fn(x, 32)


@pytest.mark.parametrize("dtype", FP8)
def test_every_pair_of_fp8_codes_decodes_as_in_the_reference(dtype: torch.dtype) -> None:
    both = torch.arange(1 << 16, dtype=torch.int32)
    codes = torch.stack((both & 255, both >> 8), -1).to(torch.uint8).view(dtype).view(256, 512)
    assert same(common.decode_e4m3(codes, torch.empty(256, 512)), formats.decode_e4m3(codes))


def test_every_byte_of_fp4_codes_decodes_as_in_the_reference() -> None:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)
    assert same(common.decode_e2m1(packed, torch.empty(8, 64)), formats.unpack_e2m1(packed))


PIECEWISE = ["linear_dense", "lm_head", "grouped_linear", "matmul_fp8", "matmul_fp4"]
PIECEWISE += ["grouped_matmul_dense", "grouped_matmul_fp8", "grouped_matmul_fp4", "index_topk"]


@pytest.mark.parametrize("name", PIECEWISE)
def test_work_in_many_pieces_is_as_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (common, linear, attention):
        monkeypatch.setattr(module, "DECODED", 1 << 9)
    op, k = OPERATORS[name], KERNEL[name]
    small = [s for s in op.samples() if not s.full and max(s.axes.values()) <= 512 and s.axes.get("k", 0) < 512]
    assert small
    for sample in small:
        verdict = judge.compare(op, k, sample)
        assert verdict.ok, verdict


def test_quantisation_in_many_pieces_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Draw("cpu/pieces", "outliers").act("x", 37, 384)
    whole = KERNEL["fake_quant_fp8"].fn(x, 64), *KERNEL["quant_act_fp8"].fn(x, 128, FP8[0])
    monkeypatch.setattr(quant, "PIECE", 1 << 9)
    assert same((KERNEL["fake_quant_fp8"].fn(x, 64), *KERNEL["quant_act_fp8"].fn(x, 128, FP8[0])), whole)


@pytest.mark.parametrize("K", [128, 1024, 1025, 4096])
def test_integer_products_are_exact_at_any_length(K: int) -> None:
    x, w = (torch.full((2, K), v, dtype=torch.int8) for v in (-128, 127))
    w[:, ::3] = -127
    assert same(linear.integer_product(x, w), (x.double() @ w.double().T).float())


def rows_alone(name: str, split: Callable[[tuple[Any, ...], int], tuple[Any, ...]], args: tuple[Any, ...]) -> bool:
    """Whether each token has the same bits alone as in the batch."""
    k = KERNEL[name]
    whole = k.fn(*args)
    parts = [k.fn(*split(args, t)) for t in range(args[0].shape[0])]
    return same(
        whole, tuple(map(torch.cat, zip(*parts, strict=True))) if isinstance(whole, tuple) else torch.cat(parts)
    )


def first_only(args: tuple[Any, ...], t: int) -> tuple[Any, ...]:
    return args[0][t : t + 1], *args[1:]


def test_kernels_that_say_so_do_not_depend_on_the_batch() -> None:
    x = Draw("cpu/alone", "normal").act("x", 6, 512)
    q, window, near, entries, far, sink, scale = next(
        s for s in OPERATORS["sparse_attention"].samples() if s.axes["T"] == 1 and s.axes["M"] == 512
    ).make()
    query = Draw("cpu/alone", "normal").act("q", 3, *q.shape[1:])
    tokens = (query, window, near.expand(3, -1).clone(), entries, far.expand(3, -1).clone(), sink, scale)
    tokens[4][1, 100:] = -1
    codes, own = formats.quantize_int8(x)
    weight, channel = formats.quantize_int8(Draw("cpu/alone", "normal").f32("w", 48, 512))
    proved = {
        "fake_quant_fp8": rows_alone("fake_quant_fp8", first_only, (x, 64)),
        "fake_quant_fp4": rows_alone("fake_quant_fp4", first_only, (x, 32)),
        "quant_act_fp8": rows_alone("quant_act_fp8", first_only, (x, 128, FP8[0])),
        "quant_act_int8": rows_alone("quant_act_int8", first_only, (x,)),
        "matmul_int8": rows_alone(
            "matmul_int8",
            lambda a, t: (a[0][t : t + 1], a[1][t : t + 1], *a[2:]),
            (codes, own, weight, channel[:, 0].contiguous(), torch.bfloat16),
        ),
        "sparse_attention": rows_alone(
            "sparse_attention",
            lambda a, t: (a[0][t : t + 1], a[1], a[2][t : t + 1], a[3], a[4][t : t + 1], *a[5:]),
            tokens,
        ),
        "sample": rows_alone("sample", lambda a, t: tuple(v[t : t + 1] for v in a), mixed_rows()),
        # its rows are products of matmul_int8's function, so that their batch cannot matter either
        "grouped_matmul_int8": rows_alone_grouped(),
    }
    assert all(proved.values()), proved
    assert set(proved) == {k.operator for k in KERNELS if k.reproducibility == "R2"}


def mixed_rows() -> tuple[Tensor, ...]:
    """Arguments of ``sample``: greedy and drawn rows side by side, tied logits among the greedy ones."""
    logits = generator.normal("cpu/logits", (6, 300)) * 3
    logits[0, 40:60] = logits[0].max() + 1
    heat = torch.tensor([0.0, 0.7, 0.0, 1.3, 1.0, 0.0])
    seeds = generator.integers("cpu/seeds", (6,), 0, 1 << 31)
    return (
        logits, heat, torch.tensor([0, 5, 3, 0, 40, 1]), torch.tensor([1, 0.9, 0.5, 0.8, 1, 1]),
        torch.tensor([0, 0, 0.1, 0.05, 0.2, 0]), seeds, seeds % 7,
    )  # fmt: skip


def rows_alone_grouped() -> bool:
    codes, own, weight, channel, offsets, dtype = claimed(KERNEL["grouped_matmul_int8"])
    codes, own = codes.expand(4, -1).clone(), own.expand(4, -1).clone()
    at = torch.zeros_like(offsets)
    at[1:] = 4
    whole = KERNEL["grouped_matmul_int8"].fn(codes, own, weight, channel, at, dtype)
    alone = KERNEL["grouped_matmul_int8"].fn(codes[:1], own[:1], weight, channel, at.clamp(max=1), dtype)
    return same(whole[:1], alone) and same(whole[1:2], alone)


def test_greedy_and_drawn_rows_side_by_side_are_the_references() -> None:
    assert agree("sample", *mixed_rows())
    greedy = (mixed_rows()[0], torch.zeros(6), *mixed_rows()[2:])
    assert agree("sample", *greedy)
    assert KERNEL["sample"].fn(*greedy)[0] == 40  # the lowest of the tied ids


def test_ties_and_nan_among_index_scores_are_the_references() -> None:
    op = OPERATORS["index_topk"]
    q, weights, keys, pages, slots, visible, k, page = next(s for s in op.samples() if s.axes["T"] == 5).make()
    visible = visible.clamp(min=k + 3)
    keys[:] = keys[:1]
    assert agree("index_topk", q, weights, keys, pages, slots, visible, k, page)
    keys[1::3] = keys[1::3] * 0.5
    keys[5] = torch.nan
    assert agree("index_topk", q, weights, keys, pages, slots, visible, k, page)
    assert agree("index_topk", q, weights.fill_(-torch.inf), keys, pages, slots, visible, k, page)


def test_attention_never_reads_a_row_that_is_not_there() -> None:
    k = KERNEL["sparse_attention"]
    q, window, near, entries, far, sink, scale = claimed(k)
    near[0, :] = -1
    near[0, 3] = 7
    keep = window[7].clone()
    window[:], entries[:] = torch.nan, torch.nan
    window[7] = keep
    assert bool(k.fn(q, window, near, entries, torch.full_like(far, -1), sink, scale).isfinite().all())
    nothing = k.fn(q, window, torch.full_like(near, -1), entries, torch.full_like(far, -1), sink, scale)
    assert same(nothing, torch.zeros_like(q))


@pytest.mark.parametrize("k", NATIVE, ids=lambda k: k.operator)
def test_a_native_kernel_is_refused_by_name_where_the_instruction_set_is_missing(k: Kernel) -> None:
    args = next(s.make() for s in OPERATORS[k.operator].samples() if s.axes.get("T", 0) > 1 and not s.full)
    call = OPERATORS[k.operator].contract.call(args, {})
    (reason,) = k.reasons(call, "x86-64-v3")
    assert reason.code == "arch"
    assert "x86-64-v3" in reason.text
    assert "avx512-bf16" in reason.text
    assert all(k.reasons(call, arch) == [] for arch in k.claim.arch)


@pytest.mark.parametrize("k", NATIVE, ids=lambda k: k.operator)
def test_a_native_kernel_is_right(k: Kernel) -> None:
    """oneDNN computes the same product on every CPU, natively or not, so the numbers are judged wherever this runs."""
    chosen = [s for s in OPERATORS[k.operator].samples() if s.axes.get("T", 0) > 1 and not s.full]
    verdicts = [judge.compare(OPERATORS[k.operator], k, s) for s in chosen]
    assert verdicts
    assert all(v.ok for v in verdicts), [v for v in verdicts if not v.ok]


@pytest.mark.parametrize("name", ["fake_quant_fp8", "fake_quant_fp4"])
def test_rows_sliced_from_wider_ones_are_claimed_and_equal_dense_rows(name: str) -> None:
    wide = Draw(f"sliced/{name}", "outliers").act("x", 5, 192)
    part = wide[:, :128]
    assert not reasons(KERNEL[name], (part, 32))
    assert same(KERNEL[name].fn(part, 32), KERNEL[name].fn(part.contiguous(), 32))
    assert agree(name, part, 32)
