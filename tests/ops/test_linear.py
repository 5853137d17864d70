"""Linears in every stored format against loops over decoded values (spec §3.2, §3.3; fault B64)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hal.errors import InputError
from hal_ops import (
    Weight,
    embed,
    formats,
    generator,
    grouped_linear,
    linear,
    linear_dense,
    linear_fp4,
    linear_fp8,
    linear_fp32,
    linear_int8,
    lm_head,
    matmul_fp4,
    matmul_fp8,
    matmul_int8,
    quant_act_fp8,
    quant_act_int8,
)

BF16, F64 = torch.bfloat16, torch.float64
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
T, N, K = 3, 130, 256
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def e4m3(byte: int, dtype: torch.dtype) -> float:
    """The value of a finite E4M3 byte."""
    bias, exponent, mantissa = (7 if dtype == FN else 8), (byte >> 3) % 16, byte % 8
    size = (8 + mantissa) * 2.0 ** (exponent - bias - 3) if exponent else mantissa * 2.0 ** (-2 - bias)
    return -size if byte >> 7 else size


def decode(codes: Tensor) -> list[list[float]]:
    return [[e4m3(b, codes.dtype) for b in row] for row in codes.view(torch.uint8).tolist()]


def exponents(scale: Tensor) -> list[list[float]]:
    return [[2.0 ** (b - 127) for b in row] for row in scale.view(torch.uint8).tolist()]


def product(a: list[list[float]], b: list[list[float]]) -> Tensor:
    """a·bᵀ in double precision by loops, and float64 [T, N]."""
    return torch.tensor([[math.fsum(x * y for x, y in zip(r, s, strict=True)) for s in b] for r in a], dtype=F64)


def sizes(a: list[list[float]], b: list[list[float]]) -> Tensor:
    """Σ|a·b|: what the error of a sum in float32 is proportional to."""
    return product([[abs(x) for x in r] for r in a], [[abs(x) for x in r] for r in b])


def check_bf16(seen: Tensor, a: list[list[float]], b: list[list[float]]) -> None:
    """One rounding to bfloat16, plus at most what float32 accumulation of K terms can lose."""
    right = product(a, b)
    assert seen.dtype == BF16
    assert bool(((seen.double() - right).abs() <= right.abs() * 2.0**-8 + sizes(a, b) * len(a[0]) * 2.0**-24).all())


def activations() -> tuple[Tensor, Tensor, list[list[float]]]:
    """FP8 codes, UE8M0 scales and the values that they denote."""
    codes, scale = formats.quantize_fp8(generator.draw("outliers", "x", (T, K)), 128)
    s = exponents(scale)
    return codes, scale, [[v * s[t][k // 128] for k, v in enumerate(row)] for t, row in enumerate(decode(codes))]


def fp8_weight(dtype: torch.dtype = FN) -> tuple[Tensor, Tensor, list[list[float]]]:
    codes = formats.encode_e4m3(generator.normal("w", (N, K)) * 64, dtype)
    scale = formats.encode_ue8m0(torch.exp2(generator.integers("s", (2, 2), -9, 3).float()))
    s = exponents(scale)
    return codes, scale, [[v * s[n // 128][k // 128] for k, v in enumerate(r)] for n, r in enumerate(decode(codes))]


def fp4_weight() -> tuple[Tensor, Tensor, list[list[float]]]:
    packed = generator.integers("w4", (N, K // 2), 0, 256).to(torch.uint8).view(torch.int8)
    scale = formats.encode_ue8m0(torch.exp2(generator.integers("s4", (N, K // 32), -8, 2).float()))
    s, values = exponents(scale), []
    for n, row in enumerate(packed.view(torch.uint8).tolist()):
        nibbles = [x for byte in row for x in (byte & 15, byte >> 4)]
        values.append([E2M1[c & 7] * (-1) ** (c >> 3) * s[n][k // 32] for k, c in enumerate(nibbles)])
    return packed, scale, values


def test_matmul_fp8_multiplies_decoded_values() -> None:
    (x, xs, a), (w, ws, b) = activations(), fp8_weight()
    assert torch.allclose(matmul_fp8(x, xs, w, ws, F64), product(a, b), rtol=0, atol=1e-9)
    check_bf16(matmul_fp8(x, xs, w, ws, BF16), a, b)


def test_matmul_fp8_takes_float32_scales_as_it_takes_exponent_bytes() -> None:
    (x, xs, _), (w, ws, _) = activations(), fp8_weight()
    wide = matmul_fp8(x, formats.decode_ue8m0(xs), w, formats.decode_ue8m0(ws), BF16)
    assert torch.equal(wide, matmul_fp8(x, xs, w, ws, BF16))


def test_matmul_fp8_speaks_fnuz_by_dtype() -> None:
    (x, xs, _), (w, ws, b) = activations(), fp8_weight(FNUZ)
    xz, sz = formats.fn_to_fnuz(x, xs)
    s = exponents(sz)
    a = [[v * s[t][k // 128] for k, v in enumerate(row)] for t, row in enumerate(decode(xz))]
    assert torch.allclose(matmul_fp8(xz, sz, w, ws, F64), product(a, b), rtol=0, atol=1e-9)


def test_matmul_fp4_multiplies_decoded_values() -> None:
    (x, xs, a), (w, ws, b) = activations(), fp4_weight()
    assert torch.allclose(matmul_fp4(x, xs, w, ws, F64), product(a, b), rtol=0, atol=1e-9)
    check_bf16(matmul_fp4(x, xs, w, ws, BF16), a, b)
    assert torch.equal(matmul_fp4(x, xs, w.view(torch.uint8), ws, BF16), matmul_fp4(x, xs, w, ws, BF16))


def test_matmul_int8_sums_exactly() -> None:
    """The integer sum can pass 2^24, where float32 would round it: 1100·127² = 17,741,900."""
    ones = torch.full((1, 1100), 127, dtype=torch.int8)
    last = ones.clone()
    last[0, -1] = 126
    y = matmul_int8(ones, torch.ones(1, 1), torch.cat((ones, last)), torch.ones(2), F64)
    assert y.tolist() == [[1100 * 127 * 127, 1100 * 127 * 127 - 127]]
    x, xs = formats.quantize_int8(generator.normal("x", (T, K)))
    w, ws = formats.quantize_int8(generator.normal("w", (N, K)))
    a = [[c * s[0] for c in row] for row, s in zip(x.tolist(), xs.tolist(), strict=True)]
    b = [[c * s[0] for c in row] for row, s in zip(w.tolist(), ws.tolist(), strict=True)]
    assert torch.allclose(matmul_int8(x, xs, w, ws[:, 0], F64), product(a, b), rtol=1e-14, atol=1e-12)
    check_bf16(matmul_int8(x, xs, w, ws[:, 0], BF16), a, b)


def test_activations_are_quantised_in_the_dialect_of_the_weight() -> None:
    """Beside 240 the value 2^-10 is the smallest FNUZ code, and half of the smallest FN code, so 0."""
    x = torch.full((1, 128), 2.0**-10)
    x[0, 0] = 240.0
    ones = torch.ones(1, 128)
    ones[0, 0] = 0.0
    scale = formats.encode_ue8m0(torch.ones(1, 1))
    assert linear_fp8(x, formats.encode_e4m3(ones, FNUZ), scale).item() == 127 * 2.0**-10
    assert linear_fp8(x, formats.encode_e4m3(ones, FN), scale).item() == 0


def test_linears_quantise_their_input_first() -> None:
    """Per token and 128 columns for FP8 and FP4, per token for INT8."""
    x = generator.draw("outliers", "x", (T, K)).to(BF16)
    (w8, s8, _), (w4, s4, _) = fp8_weight(), fp4_weight()
    w, ws = formats.quantize_int8(generator.normal("w", (N, K)))
    assert torch.equal(linear_fp8(x, w8, s8), matmul_fp8(*formats.quantize_fp8(x, 128), w8, s8, BF16))
    assert torch.equal(linear_fp4(x, w4, s4), matmul_fp4(*formats.quantize_fp8(x, 128), w4, s4, BF16))
    assert torch.equal(linear_int8(x, w, ws[:, 0]), matmul_int8(*formats.quantize_int8(x), w, ws[:, 0], BF16))
    codes, scale = quant_act_fp8(x, 128, FN)
    assert (codes.dtype, scale.dtype, tuple(scale.shape)) == (FN, torch.float8_e8m0fnu, (T, 2))
    assert quant_act_int8(x)[1].shape == (T, 1)


@pytest.mark.parametrize("carrier", [BF16, torch.float32, F64])
def test_dense_linear_rounds_once(carrier: torch.dtype) -> None:
    x, w = generator.normal("x", (T, K)).to(carrier), (generator.normal("w", (N, K)) / 16).to(carrier)
    y, a, b = linear_dense(x, w), x.tolist(), w.tolist()
    assert y.dtype == carrier
    if carrier == BF16:
        check_bf16(y, a, b)
    else:
        unit = 2.0**-24 if carrier == torch.float32 else 2.0**-53
        assert bool(((y.double() - product(a, b)).abs() <= sizes(a, b) * K * unit).all())


@pytest.mark.parametrize("op", [linear_fp32, lm_head])
def test_float32_linears_widen_both_operands_and_keep_the_sum(op: object) -> None:
    x, w = generator.normal("x", (T, K)).to(BF16), generator.normal("w", (N, K)).to(BF16)
    y = (linear_fp32 if op is linear_fp32 else lm_head)(x, w)
    assert y.dtype == torch.float32
    a, b = x.tolist(), w.tolist()
    assert bool(((y.double() - product(a, b)).abs() <= sizes(a, b) * K * 2.0**-24).all())
    assert linear_fp32(x, w.double()).dtype == F64
    assert bool((y != y.to(BF16).float()).any())


def test_grouped_linear_is_one_linear_a_group() -> None:
    x, w = generator.normal("x", (T, 3, 64)).double(), generator.normal("w", (3, 7, 64)).double()
    y = grouped_linear(x, w)
    for g in range(3):
        assert torch.allclose(y[:, g], product(x[:, g].tolist(), w[g].tolist()), rtol=0, atol=1e-12)
    check_bf16(grouped_linear(x.to(BF16), w.to(BF16))[:, 1], x.to(BF16)[:, 1].tolist(), w.to(BF16)[1].tolist())


def test_embed_gathers_rows_bit_by_bit() -> None:
    table = generator.normal("e", (11, 6)).to(BF16)
    ids = torch.tensor([10, 0, 3, 3])
    assert [r.tolist() for r in embed(ids, table)] == [table[i].tolist() for i in (10, 0, 3, 3)]
    assert torch.equal(embed(ids.int(), table), embed(ids, table))
    assert embed(ids[:0], table).shape == (0, 6)


def test_the_format_of_a_weight_picks_its_linear() -> None:
    x = generator.normal("x", (T, K)).to(BF16)
    (w8, s8, _), (w4, s4, _) = fp8_weight(), fp4_weight()
    w, ws = formats.quantize_int8(generator.normal("w", (N, K)))
    dense = generator.normal("w", (N, K)).to(BF16)
    assert torch.equal(linear(x, Weight(w8, s8, "fp8", True)), linear_fp8(x, w8, s8))
    assert torch.equal(linear(x, Weight(w4, s4, "fp4", True)), linear_fp4(x, w4, s4))
    assert torch.equal(linear(x, Weight(w, ws[:, 0], "int8")), linear_int8(x, w, ws[:, 0]))
    assert torch.equal(linear(x, Weight(dense)), linear_dense(x, dense))
    rounded = formats.fake_quantize_fp8(x, 128)
    assert torch.equal(linear(x, Weight(dense, quantised_act=True)), linear_dense(rounded, dense))
    assert not torch.equal(linear(x, Weight(dense, quantised_act=True)), linear_dense(x, dense))


def test_a_decoded_weight_gives_the_product_of_the_coded_one() -> None:
    """The trained graph rounds the input whether or not the weight is stored in FP8."""
    x = generator.normal("x", (T, K)).double()
    w, s, values = fp8_weight()
    decoded = Weight(torch.tensor(values, dtype=F64), quantised_act=True)
    assert torch.allclose(linear(x, decoded), linear(x, Weight(w, s, "fp8", True)), rtol=0, atol=1e-9)


def test_a_weight_knows_its_rows_and_bytes() -> None:
    w, s, _ = fp4_weight()
    held = Weight(w, s, "fp4", True)
    assert held.rows == N
    assert held.nbytes == N * K // 2 + N * K // 32
    with pytest.raises(InputError, match="weight of format int8 has no scale"):
        linear(torch.zeros(1, K, dtype=BF16), Weight(torch.zeros(N, K, dtype=torch.int8), None, "int8"))


@pytest.mark.parametrize("shape", [(N, 1), (1, 1), (2, 3)])
def test_b64_a_scale_that_does_not_fit_is_refused(shape: tuple[int, int]) -> None:
    (x, xs, _), (w, _, _), (w4, _, _) = activations(), fp8_weight(), fp4_weight()
    with pytest.raises(InputError, match="matmul_fp8: weight_scale"):
        matmul_fp8(x, xs, w, torch.ones(shape), BF16)
    with pytest.raises(InputError, match="matmul_fp4: weight_scale"):
        matmul_fp4(x, xs, w4, torch.ones(shape), BF16)
    with pytest.raises(InputError, match="matmul_fp8: weight is int8, right is fp8"):
        matmul_fp8(x, xs, w4, torch.ones(shape), BF16)


def test_k9_no_tokens() -> None:
    none = torch.zeros(0, K, dtype=BF16)
    (w8, s8, _), (w4, s4, _) = fp8_weight(), fp4_weight()
    for y in (linear_fp8(none, w8, s8), linear_fp4(none, w4, s4), linear_dense(none, torch.zeros(N, K, dtype=BF16))):
        assert y.shape == (0, N)
        assert y.dtype == BF16
