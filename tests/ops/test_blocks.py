"""Block scaling: activations, weights, conversions between weight formats, INT8 rows, the Hadamard rotation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hal.errors import InputError
from hal_ops import formats, generator

FN, FNUZ, E8M0 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu
DIALECTS = pytest.mark.parametrize("dtype", [FN, FNUZ], ids=["fn", "fnuz"])
CARRIERS = pytest.mark.parametrize("carrier", [torch.float32, torch.bfloat16, torch.float64])
FAMILIES = pytest.mark.parametrize("family", ["normal", "outliers", "rows", "adversarial"])


def scales(*values: list[int]) -> Tensor:
    """UE8M0 scales 2^value."""
    return (torch.tensor(values) + 127).to(torch.uint8).view(E8M0)


def raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def random_fp8(key: str, *shape: int) -> Tensor:
    return formats.encode_e4m3(generator.normal(key, shape) * 64, FN)


def random_packed(key: str, *shape: int) -> Tensor:
    return generator.integers(key, shape, 0, 256).to(torch.uint8).view(torch.int8)


# --- activations and state rows --------------------------------------------------------------------------------------


@DIALECTS
@FAMILIES
def test_fp8_error_is_at_most_half_a_step_of_the_stored_scale(dtype: torch.dtype, family: str) -> None:
    x = generator.draw(family, "fp8 error", (32, 256))
    codes, scale = formats.quantize_fp8(x, 128, dtype)
    assert (codes.dtype, scale.dtype, codes.shape, scale.shape) == (dtype, E8M0, (32, 256), (32, 2))
    s = formats.decode_scale(scale).double().repeat_interleave(128, -1)
    least = 2.0**-10 if dtype == FN else 2.0**-11
    half_step = torch.clamp(2.0 ** ((x.double() / s).abs().log2().floor() - 4), min=least) * s
    error = (formats.dequantize_fp8(codes, scale, 128).double() - x.double()).abs()
    assert bool((error <= half_step).all())


@FAMILIES
def test_fp4_error_is_at_most_half_a_step_of_the_stored_scale(family: str) -> None:
    x = generator.draw(family, "fp4 error", (32, 128))
    packed, scale = formats.quantize_fp4(x)
    assert (packed.dtype, scale.dtype, packed.shape, scale.shape) == (torch.int8, E8M0, (32, 64), (32, 4))
    s = formats.decode_scale(scale).double().repeat_interleave(32, -1)
    half_step = torch.clamp(2.0 ** ((x.double() / s).abs().log2().floor() - 2), min=0.25) * s
    error = (formats.dequantize_weight_fp4(packed, scale).double() - x.double()).abs()
    assert bool((error <= half_step).all())


@FAMILIES
def test_fake_quantisation_is_quantise_then_dequantise_and_changes_nothing_twice(family: str) -> None:
    x = generator.draw(family, "fake", (8, 256)).bfloat16()
    once8, once4 = formats.fake_quantize_fp8(x, 64), formats.fake_quantize_fp4(x)
    assert once8.dtype == once4.dtype == torch.bfloat16
    assert torch.equal(once8, formats.dequantize_fp8(*formats.quantize_fp8(x, 64), 64).bfloat16())
    assert torch.equal(once4, formats.dequantize_weight_fp4(*formats.quantize_fp4(x)).bfloat16())
    assert torch.equal(formats.fake_quantize_fp8(once8, 64), once8)
    assert torch.equal(formats.fake_quantize_fp4(once4), once4)


@CARRIERS
def test_carriers_agree_on_equal_values(carrier: torch.dtype) -> None:
    x = generator.draw("outliers", "carriers", (8, 256)).bfloat16()
    for quantize in (lambda t: formats.quantize_fp8(t, 128, FNUZ), formats.quantize_fp4, formats.quantize_int8):
        for got, right in zip(quantize(x.to(carrier)), quantize(x.float()), strict=True):
            assert torch.equal(raw(got), raw(right))
    assert torch.equal(formats.fake_quantize_fp8(x.to(carrier), 64).double(), formats.fake_quantize_fp8(x, 64).double())


def test_a_float64_maximum_is_read_as_float32_for_the_scale() -> None:
    x = torch.full((1, 32), 448 * (1 + 2.0**-40), dtype=torch.float64)
    codes, scale = formats.quantize_fp8(x, 32)
    assert formats.decode_scale(scale).tolist() == [[1.0]]
    assert set(raw(codes).flatten().tolist()) == {0x7E}


def test_golden_fp4_scales_and_values() -> None:
    rows = torch.zeros(5, 32)
    rows[:, 3] = torch.tensor([6.0, 6.1, 5.9, 0.75, -96.0])
    packed, scale = formats.quantize_fp4(rows)
    assert formats.decode_scale(scale).flatten().tolist() == [1.0, 2.0, 1.0, 0.125, 16.0]
    assert formats.unpack_e2m1(packed)[:, 3].tolist() == [6.0, 3.0, 6.0, 6.0, -6.0]


@DIALECTS
def test_b07_zero_and_tiny_blocks_are_finite(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 128)
    rows[1] = 1e-30
    rows[2, 0] = 1.0
    codes, scale = formats.quantize_fp8(rows, 128, dtype)
    assert raw(scale)[:2].flatten().tolist() == [127 - (22 if dtype == FN else 21)] * 2
    assert formats.dequantize_fp8(codes, scale, 128).tolist() == [[0.0] * 128, [0.0] * 128, [1.0] + [0.0] * 127]


def test_b07_a_zero_fp4_block_has_the_least_scale_and_a_tiny_one_keeps_its_values() -> None:
    rows = torch.zeros(2, 32)
    rows[1] = 2.0**-100
    packed, scale = formats.quantize_fp4(rows)
    assert raw(scale).flatten().tolist() == [1, 127 - 102]
    assert torch.equal(formats.dequantize_weight_fp4(packed, scale), rows)


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
@CARRIERS
def test_a_damaged_block_decodes_to_nan_and_its_neighbour_is_untouched(damage: float, carrier: torch.dtype) -> None:
    x = torch.ones(1, 64, dtype=carrier)
    x[0, 7] = damage
    for y in (formats.fake_quantize_fp8(x, 32), formats.fake_quantize_fp4(x)):
        assert y[0, :32].isnan().all()
        assert torch.equal(y[0, 32:], x[0, 32:])
    assert formats.dequantize_int8(*formats.quantize_int8(x)).isnan().all()


def test_no_rows_and_no_blocks() -> None:
    for shape in ((0, 128), (2, 0), (3, 0, 64)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        assert formats.fake_quantize_fp8(x, 64).shape == shape
        assert formats.fake_quantize_fp4(x).shape == shape


def test_a_strided_view_quantises_as_its_copy() -> None:
    x = generator.normal("strided", (16, 256)).bfloat16()
    view = x[::2, 64:192]
    for got, right in zip(formats.quantize_fp8(view, 64), formats.quantize_fp8(view.contiguous(), 64), strict=True):
        assert torch.equal(raw(got), raw(right))


def test_an_axis_that_is_no_multiple_of_the_block_is_named() -> None:
    with pytest.raises(InputError, match="K = 100 is no multiple of block = 64"):
        formats.quantize_fp8(torch.zeros(2, 100), 64)
    with pytest.raises(InputError, match="K = 48 is no multiple of block = 32"):
        formats.fake_quantize_fp4(torch.zeros(2, 48))
    with pytest.raises(InputError, match="block = 0"):
        formats.quantize_fp8(torch.zeros(2, 64), 0)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 256), (130, 200), (1, 1), (3, 130, 200)])
def test_an_fp8_weight_is_code_times_the_scale_of_its_block(shape: tuple[int, ...]) -> None:
    w = random_fp8("weight", *shape)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = (generator.integers("weight scale", blocks, 110, 120)).to(torch.uint8).view(E8M0)
    got = formats.dequantize_weight_fp8(w, scale)
    codes, factors = formats.decode_e4m3(w), formats.decode_scale(scale)
    for at in ((0, 0), (shape[-2] - 1, shape[-1] - 1), (shape[-2] // 2, shape[-1] - 1), (shape[-2] - 1, 0)):
        block = (..., at[0] // 128, at[1] // 128)
        assert torch.equal(got[(..., *at)], codes[(..., *at)] * factors[block])
    assert torch.equal(formats.dequantize_weight_fp8(w, formats.decode_scale(scale)), got)


def test_other_block_shapes_place_their_scales() -> None:
    w = formats.encode_e4m3(torch.ones(3, 5), FN)
    got = formats.dequantize_weight_fp8(w, scales([0, 1, 2], [3, 4, 5]), block=(2, 2))
    assert got.tolist() == [[1, 1, 2, 2, 4], [1, 1, 2, 2, 4], [8, 8, 16, 16, 32]]


def test_b20_weight_bytes_are_codes_not_integers() -> None:
    w = torch.tensor([[0x38, 0xB8, 0x40]], dtype=torch.uint8).view(FN)
    assert formats.dequantize_weight_fp8(w, scales([-3])).tolist() == [[0.125, -0.125, 0.25]]


def test_b04_every_fp8_dialect_is_decoded_and_an_unknown_dtype_raises() -> None:
    values = generator.normal("b04", (256, 256)).bfloat16().clamp(-1, 1)
    fn = formats.encode_e4m3(values, FN)
    fnuz, scale = formats.fn_to_fnuz(fn, scales([0, 0], [0, 0]))
    right = formats.dequantize_weight_fp8(fn, scales([0, 0], [0, 0]))
    assert torch.equal(formats.dequantize_weight_fp8(fnuz, scale), right)
    with pytest.raises(InputError, match="uint8 is no E4M3 dialect"):
        formats.dequantize_weight_fp8(raw(fn), scale)


def test_b64_a_scale_of_the_wrong_shape_is_refused_with_the_right_one() -> None:
    packed, wide = random_packed("b64", 8, 16), scales([0] * 8).T.contiguous()
    assert formats.dequantize_weight_fp4(packed, wide).shape == (8, 32)
    with pytest.raises(InputError, match=r"\[1, 1\], right for packed FP4 weight \[8, 16\] is \[8, 1\]"):
        formats.dequantize_weight_fp4(packed, scales([0]))
    with pytest.raises(InputError, match=r"\[8, 1\], right for FP8 weight \[8, 16\] is \[1, 1\]"):
        formats.dequantize_weight_fp8(packed.view(FN), wide)


def test_an_fp4_weight_has_one_scale_per_row_and_32_elements() -> None:
    packed = torch.full((2, 2, 32), 0x22, dtype=torch.int8)  # ones
    scale = torch.arange(127, 135).to(torch.uint8).view(2, 2, 2)
    got = formats.dequantize_weight_fp4(packed, scale.view(E8M0))
    assert torch.equal(got, (2.0 ** torch.arange(8.0)).view(2, 2, 2).repeat_interleave(32, -1))


@pytest.mark.parametrize("shape", [(128, 128), (130, 224), (7, 32), (256, 384)])
def test_fp4_to_fp8_loses_nothing_at_the_widest_span(shape: tuple[int, int]) -> None:
    packed = random_packed("fp4", shape[0], shape[1] // 2)
    scale = generator.integers("fp4 scale", (shape[0], shape[1] // 32), 100, 115).to(torch.uint8).view(E8M0)
    codes, new = formats.fp4_to_fp8_weight(packed, scale)
    assert (codes.dtype, new.dtype, codes.shape) == (FN, E8M0, shape)
    values = formats.dequantize_weight_fp4(packed, scale)
    assert torch.equal(formats.dequantize_weight_fp8(codes, new), values)
    as_float = formats.fp4_to_fp8_weight(packed, formats.decode_scale(scale))
    assert torch.equal(raw(as_float[0]), raw(codes))


def test_fp4_to_fp8_keeps_every_code_at_both_ends_of_a_span_of_2_to_the_14() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8).reshape(2, 128)
    scale = scales([0, -14] * 4, [-14, 0] * 4)
    codes, new = formats.fp4_to_fp8_weight(packed, scale)
    assert raw(new).tolist() == [[121, 121]]
    assert torch.equal(formats.dequantize_weight_fp8(codes, new), formats.dequantize_weight_fp4(packed, scale))


@pytest.mark.parametrize(
    ("at", "byte", "message"),
    [
        ((129, 4), 127 - 15, r"block \[1, 1\].*span more than 2\^14"),
        ((0, 0), 127 + 15, r"block \[0, 0\].*span more than 2\^14"),
        ((5, 4), 255, r"block \[0, 1\].*NaN \(byte 255\)"),
    ],
)
def test_fp4_to_fp8_refuses_a_block_that_would_lose_values(at: tuple[int, int], byte: int, message: str) -> None:
    scale = torch.full((200, 8), 127, dtype=torch.uint8)
    scale[at] = byte
    with pytest.raises(InputError, match=message):
        formats.fp4_to_fp8_weight(random_packed("refuse", 200, 128), scale.view(E8M0))


def test_fp4_to_fp8_refuses_scales_too_small_for_the_new_scale() -> None:
    packed = random_packed("small", 2, 16)
    codes, new = formats.fp4_to_fp8_weight(packed, torch.full((2, 1), 6, dtype=torch.uint8).view(E8M0))
    assert raw(new).tolist() == [[0]]
    assert torch.equal(formats.decode_e4m3(codes), formats.unpack_e2m1(packed) * 64)
    with pytest.raises(InputError, match=r"below 2\^-121"):
        formats.fp4_to_fp8_weight(packed, torch.full((2, 1), 5, dtype=torch.uint8).view(E8M0))


def test_fn_to_fnuz_keeps_every_value() -> None:
    byte = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    w = byte.view(FN)[None]
    for scale in (scales([-3, 5]), torch.tensor([[0.125, 3.0]])):
        codes, new = formats.fn_to_fnuz(w, scale)
        assert (codes.dtype, new.dtype) == (FNUZ, scale.dtype)
        right = formats.dequantize_weight_fp8(w, scale)
        assert torch.equal(formats.dequantize_weight_fp8(codes, new), right)
        assert 0x80 not in raw(codes).tolist()[0]


def test_b63_doubling_a_scale_adds_one_to_its_exponent_and_refuses_overflow() -> None:
    w = formats.encode_e4m3(torch.ones(1, 1), FN)
    assert raw(formats.fn_to_fnuz(w, torch.tensor([[253]], dtype=torch.uint8).view(E8M0))[1]).tolist() == [[254]]
    for byte in (254, 255):
        with pytest.raises(InputError, match="254 or 255"):
            formats.fn_to_fnuz(w, torch.tensor([[byte]], dtype=torch.uint8).view(E8M0))
    with pytest.raises(InputError, match="float32 scale"):
        formats.fn_to_fnuz(w, torch.tensor([[2.0**127]]))
    with pytest.raises(InputError, match="int8"):
        formats.fn_to_fnuz(w, torch.tensor([[1]], dtype=torch.int8))


def test_fn_to_fnuz_refuses_nan_codes_and_weights_that_are_not_fn() -> None:
    w = torch.tensor([[0x7F]], dtype=torch.uint8)
    with pytest.raises(InputError, match="NaN codes"):
        formats.fn_to_fnuz(w.view(FN), scales([0]))
    with pytest.raises(InputError, match="float8_e4m3fnuz, right is float8_e4m3fn"):
        formats.fn_to_fnuz(w.view(FNUZ), scales([0]))


# --- INT8 rows --------------------------------------------------------------------------------------------------------


def test_int8_rows_are_symmetric_and_round_to_even() -> None:
    codes, scale = formats.quantize_int8(torch.tensor([[127.0, -127.0, 2.5, 3.5, -0.5, 0.0], [0.0] * 6]))
    assert codes.tolist() == [[127, -127, 2, 4, 0, 0], [0] * 6]
    assert scale.tolist() == [[1.0], [1.0]]
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)


@FAMILIES
def test_int8_error_is_at_most_half_a_step(family: str) -> None:
    x = generator.draw(family, "int8", (48, 96))
    codes, scale = formats.quantize_int8(x)
    assert int(codes.min()) >= -127
    error = (codes.double() * scale.double() - x.double()).abs()
    # the scale itself carries two float32 roundings and the quotient one, at most 127 steps from zero
    assert bool((error <= scale.double() * (0.5 + 127 * 3 * 2.0**-24)).all())
    assert torch.equal(formats.dequantize_int8(codes, scale), codes.float() * scale)


def test_int8_of_a_row_whose_scale_underflows_is_zero() -> None:
    codes, scale = formats.quantize_int8(torch.tensor([[2.0**-149, 0.0]]))
    assert (codes.tolist(), scale.tolist()) == ([[0, 0]], [[1.0]])


# --- Hadamard -----------------------------------------------------------------------------------------------------------


def sylvester(n: int) -> Tensor:
    """H[i][j] = (-1)^popcount(i & j)."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(n)] for i in range(n)]
    return torch.tensor(signs, dtype=torch.float64)


def test_hadamard_golden_example() -> None:
    y = formats.hadamard(torch.arange(8.0))
    right = [9.899495, -1.414214, -2.828427, 0, -5.656854, 0, 0, 0]
    assert y.tolist() == pytest.approx(right, abs=5e-7)


@pytest.mark.parametrize("n", [1, 2, 8, 128])
def test_hadamard_is_the_sylvester_matrix_over_the_root_of_n(n: int) -> None:
    rows = formats.hadamard(torch.eye(n, dtype=torch.float64))
    assert torch.equal(rows, sylvester(n) * n**-0.5)


def test_hadamard_twice_is_the_identity() -> None:
    # integers and n = 64 = 8^2: every step is exact, so is the result
    x = generator.integers("involution", (5, 64), -1000, 1000).float()
    assert torch.equal(formats.hadamard(formats.hadamard(x)), x)


def test_hadamard_rounds_once_to_its_carrier() -> None:
    x = generator.normal("carrier", (7, 128)).bfloat16()
    assert torch.equal(formats.hadamard(x), formats.hadamard(x.float()).bfloat16())
    assert formats.hadamard(torch.zeros(0, 128)).shape == (0, 128)


@pytest.mark.parametrize("n", [0, 3, 96])
def test_hadamard_refuses_an_axis_that_is_no_power_of_two(n: int) -> None:
    with pytest.raises(InputError, match=f"n = {n}, right is a power of two"):
        formats.hadamard(torch.zeros(2, n))
