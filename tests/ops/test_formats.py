"""Element formats against tables written from their definitions: FP8 in both dialects, FP4, UE8M0, the scale rule."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hal.errors import InputError
from hal_ops import formats, generator

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BIAS = {FN: 7, FNUZ: 8}
DIALECTS = pytest.mark.parametrize("dtype", [FN, FNUZ], ids=["fn", "fnuz"])
CARRIERS = pytest.mark.parametrize("carrier", [torch.float32, torch.bfloat16, torch.float64])


def e4m3_magnitudes(dtype: torch.dtype) -> list[float]:
    """Magnitudes of the finite codes 0 … in order: eight subnormal steps, then eight steps an octave."""
    subnormal = [m * 2.0 ** (1 - BIAS[dtype]) / 8 for m in range(8)]
    normal = [2.0 ** (e - BIAS[dtype]) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
    return subnormal + (normal[:-1] if dtype == FN else normal)


def e4m3_table(dtype: torch.dtype) -> list[float]:
    """The value of each of the 256 bytes."""
    half = e4m3_magnitudes(dtype)
    if dtype == FN:
        half = [*half, math.nan]
    table = half + [-v for v in half]
    if dtype == FNUZ:
        table[0x80] = math.nan
    return table


E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def all_codes(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, except that any NaN equals any NaN."""
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


def encoded(values: list[float], dtype: torch.dtype, carrier: torch.dtype = torch.float64) -> list[int]:
    return formats.encode_e4m3(torch.tensor(values, dtype=carrier), dtype).view(torch.uint8).tolist()


def e4m3_rounded(values: list[float]) -> list[float]:
    codes = formats.encode_e4m3(torch.tensor(values, dtype=torch.float32), FN)
    return formats.decode_e4m3(codes).tolist()


# --- E4M3 -----------------------------------------------------------------------------------------------------------


def test_the_tables_of_this_test_have_the_published_landmarks() -> None:
    fn, fnuz = e4m3_table(FN), e4m3_table(FNUZ)
    assert (fn[0x01], fn[0x08], fn[0x38], fn[0x7E]) == (2.0**-9, 2.0**-6, 1.0, 448.0)
    assert (fnuz[0x01], fnuz[0x08], fnuz[0x40], fnuz[0x7F]) == (2.0**-10, 2.0**-7, 1.0, 240.0)
    assert [i for i, v in enumerate(fn) if math.isnan(v)] == [0x7F, 0xFF]
    assert [i for i, v in enumerate(fnuz) if math.isnan(v)] == [0x80]
    assert (formats.FORMATS["e4m3fn"].max, formats.FORMATS["e4m3fnuz"].max) == (448.0, 240.0)


@DIALECTS
def test_all_256_bytes_decode_to_their_definition(dtype: torch.dtype) -> None:
    assert same(formats.decode_e4m3(all_codes(dtype)), torch.tensor(e4m3_table(dtype)))


@DIALECTS
@CARRIERS
def test_encoding_a_decoded_code_gives_it_back(dtype: torch.dtype, carrier: torch.dtype) -> None:
    values = formats.decode_e4m3(all_codes(dtype)).to(carrier)
    back = formats.encode_e4m3(values, dtype).view(torch.uint8)
    nan = values.isnan()
    assert torch.equal(back[~nan], all_codes(dtype).view(torch.uint8)[~nan])
    assert set(back[nan].tolist()) == {0x7F if dtype == FN else 0x80}


@DIALECTS
@pytest.mark.parametrize("carrier", [torch.float32, torch.float64])
def test_every_midpoint_rounds_to_the_even_code_and_its_neighbours_to_the_nearer(
    dtype: torch.dtype, carrier: torch.dtype
) -> None:
    values = e4m3_magnitudes(dtype)
    number = np.float32 if carrier == torch.float32 else np.float64
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        middle = number((low + high) / 2)
        below, above = float(np.nextafter(middle, number(0))), float(np.nextafter(middle, number(1e9)))
        even = code + code % 2
        assert encoded([below, float(middle), above], dtype, carrier) == [code, even, code + 1]
        zero = 0x00 if dtype == FNUZ else 0x80
        negative = [(0x80 | c) if c else zero for c in (code, even, code + 1)]
        assert encoded([-below, -float(middle), -above], dtype, carrier) == negative


@DIALECTS
def test_every_bfloat16_value_rounds_to_its_nearest_code(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    table = torch.tensor(e4m3_magnitudes(dtype), dtype=torch.float64)
    distance = (x.double().abs().clamp(max=float(table[-1]))[:, None] - table).abs()
    got = (formats.encode_e4m3(x, dtype).view(torch.uint8) & 0x7F).long()
    nearest = distance.amin(1)
    assert torch.equal(distance.gather(1, got[:, None])[:, 0], nearest)
    tied = (distance == nearest[:, None]).sum(1) == 2
    assert tied.any()
    assert not (got[tied] % 2).any()


@DIALECTS
def test_carriers_agree_on_equal_values(dtype: torch.dtype) -> None:
    x = (generator.normal("carriers", (64, 64)) * 100).bfloat16()
    codes = [formats.encode_e4m3(x.to(c), dtype).view(torch.uint8) for c in (x.dtype, torch.float32, torch.float64)]
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])


def test_a_float64_is_rounded_once() -> None:
    # float32 would make these exactly the midpoint of 16 and 18, and the tie would then go to 16
    assert encoded([17 * (1 + 2.0**-40), 17.0, 19 * (1 - 2.0**-40)], FN) == encoded([18.0, 16.0, 18.0], FN)
    assert encoded([1e-300, 1e300], FN) == [0x00, 0x7E]


@DIALECTS
@CARRIERS
def test_beyond_the_maximum_saturates_and_nan_stays_nan(dtype: torch.dtype, carrier: torch.dtype) -> None:
    top = 0x7E if dtype == FN else 0x7F
    assert encoded([464.0, 1e30, math.inf], dtype, carrier) == [top] * 3
    assert encoded([-464.0, -1e30, -math.inf], dtype, carrier) == [top | 0x80] * 3
    assert encoded([math.nan, -math.nan], dtype, carrier) == [0x7F if dtype == FN else 0x80] * 2


def test_a_nan_whose_payload_is_in_the_low_bits_alone_is_nan() -> None:
    x = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert formats.encode_e4m3(x, FN).view(torch.uint8).tolist() == [0x7F]


def test_golden_e4m3_roundings() -> None:
    given_values = [0.0009765625, 0.001, 1.0625, 1.1875, 17, 19, 248, 0.4375, -3.3, 447.9, 464]
    right = [0, 0.001953125, 1, 1.25, 16, 20, 256, 0.4375, -3.25, 448, 448]
    assert e4m3_rounded([float(v) for v in given_values]) == right


def test_any_other_dtype_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="uint8 is no E4M3 dialect"):
        formats.decode_e4m3(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(InputError, match="float8_e5m2 is no E4M3 dialect"):
        formats.encode_e4m3(torch.zeros(2), torch.float8_e5m2)


def test_strided_and_empty_tensors_encode_and_decode() -> None:
    x = generator.normal("strided", (6, 8)).T
    codes = formats.encode_e4m3(x, FN)
    assert codes.shape == (8, 6)
    assert torch.equal(codes.view(torch.uint8), formats.encode_e4m3(x.contiguous(), FN).view(torch.uint8))
    assert torch.equal(formats.decode_e4m3(codes[:, ::2]), formats.decode_e4m3(codes)[:, ::2])
    assert formats.decode_e4m3(formats.encode_e4m3(torch.zeros(0, 4), FN)).shape == (0, 4)


def test_b01_each_dialect_reads_its_own_bytes() -> None:
    stored = torch.tensor([0x38, 0x7E, 0x01], dtype=torch.uint8)
    assert formats.decode_e4m3(stored.view(FN)).tolist() == [1.0, 448.0, 2.0**-9]
    assert formats.decode_e4m3(stored.view(FNUZ)).tolist() == [0.5, 224.0, 2.0**-10]


@DIALECTS
def test_b01_a_row_of_ones_is_read_as_written(dtype: torch.dtype) -> None:
    codes, scale = formats.quantize_fp8(torch.ones(1, 64), 64, dtype)
    assert torch.equal(formats.dequantize_fp8(codes, scale, 64), torch.ones(1, 64))


def test_b02_b03_negative_underflow_is_never_the_nan_of_fnuz() -> None:
    row = torch.full((1, 64), -1e-4)
    row[0, 0] = 448.0
    codes, scale = formats.quantize_fp8(row, 64, FNUZ)
    assert 0x80 not in codes.view(torch.uint8).tolist()[0]
    assert formats.dequantize_fp8(codes, scale, 64).tolist() == [[448.0] + [0.0] * 63]
    assert encoded([-0.0, -1e-30, -(2.0**-11)], FNUZ) == [0, 0, 0]
    assert encoded([-0.0, -1e-30], FN) == [0x80, 0x80]


# --- E2M1 -----------------------------------------------------------------------------------------------------------


@CARRIERS
def test_all_16_e2m1_codes_decode_and_encode(carrier: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert same(formats.decode_e2m1(codes), torch.tensor(E2M1_TABLE))
    assert torch.equal(formats.encode_e2m1(formats.decode_e2m1(codes).to(carrier)), codes)


def test_every_e2m1_midpoint_rounds_to_the_even_code_and_its_neighbours_to_the_nearer() -> None:
    for code, (low, high) in enumerate(itertools.pairwise(E2M1_TABLE[:8])):
        middle = (low + high) / 2
        x = torch.tensor([np.nextafter(middle, 0), middle, np.nextafter(middle, 9)], dtype=torch.float64)
        right = [code, code + code % 2, code + 1]
        assert formats.encode_e2m1(x).tolist() == right
        assert formats.encode_e2m1(-x).tolist() == [c | 8 for c in right]


def test_golden_e2m1_roundings_keep_the_sign_of_zero() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -2.5, 0.1])
    right = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, -0.0, -2, 0])
    assert same(formats.decode_e2m1(formats.encode_e2m1(x)), right)


def test_e2m1_saturates_at_six_and_refuses_nan() -> None:
    x = torch.tensor([7.0, 1e30, math.inf, -math.inf])
    assert formats.encode_e2m1(x).tolist() == [7, 7, 7, 15]
    with pytest.raises(InputError, match="NaN"):
        formats.encode_e2m1(torch.tensor([1.0, math.nan]))


def test_the_even_element_is_in_the_low_nibble() -> None:
    assert formats.unpack_e2m1(torch.tensor([0x2F], dtype=torch.uint8)).tolist() == [-6.0, 1.0]
    assert formats.pack_e2m1(torch.tensor([0xF, 0x2], dtype=torch.uint8)).tolist() == [0x2F]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_all_256_packed_bytes_unpack_and_pack_back(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = formats.unpack_e2m1(packed)
    right = [E2M1_TABLE[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert same(values, torch.tensor(right))
    assert torch.equal(formats.pack_e2m1(formats.encode_e2m1(values)), packed.view(torch.int8))


def test_packing_refuses_an_odd_axis_and_unpacking_a_float() -> None:
    with pytest.raises(InputError, match="K = 3"):
        formats.pack_e2m1(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(InputError, match="float8_e4m3fn, right is int8 or uint8"):
        formats.unpack_e2m1(torch.zeros(4, dtype=torch.uint8).view(FN))


# --- UE8M0 and the scale rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_all_256_scale_bytes_decode_and_encode_back(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = formats.decode_ue8m0(scale)
    assert values.dtype == torch.float32
    assert values[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()
    assert torch.equal(formats.encode_ue8m0(values).view(torch.uint8), scale.view(torch.uint8))


def test_b08_the_smallest_scale_survives_a_processor_that_flushes_subnormals() -> None:
    # a process of its own: nothing may have been computed before the mode is set
    code = (
        "import torch; assert torch.set_flush_denormal(True); from hal_ops import formats;"
        "s = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu);"
        "print(formats.decode_ue8m0(s).view(torch.int32).tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([0x00400000, 1 << 23, 127 << 23, 254 << 23, 0x7FC00000])


def test_a_scale_is_float32_or_ue8m0_and_its_bytes_are_never_read_as_integers() -> None:
    as_float = torch.tensor([0.125, 3.0])
    assert formats.decode_scale(as_float) is as_float
    assert formats.decode_scale(torch.tensor([124], dtype=torch.uint8).view(torch.float8_e8m0fnu)).tolist() == [0.125]
    with pytest.raises(InputError, match="int8"):
        formats.decode_scale(torch.tensor([1], dtype=torch.int8))


@pytest.mark.parametrize("wrong", [3.0, 0.0, -1.0, math.inf, 2.0**-128, 2.0**-149])
def test_encoding_a_scale_refuses_what_is_no_power_of_two_in_range(wrong: float) -> None:
    with pytest.raises(InputError, match="no power of two"):
        formats.encode_ue8m0(torch.tensor([1.0, wrong]))


def test_encoding_a_float64_scale_is_not_fooled_by_rounding() -> None:
    with pytest.raises(InputError, match="no power of two"):
        formats.encode_ue8m0(torch.tensor([1 + 2.0**-40], dtype=torch.float64))


def test_golden_scales() -> None:
    amax = torch.tensor([448.0, 449, 447, 224, 3.5, 1e-5, 0, 500000]).clamp(min=1e-4)
    assert formats.pow2_scale(amax, 448.0).tolist() == [1, 2, 1, 0.5, 2.0**-7, 2.0**-22, 2.0**-22, 2048]
    assert formats.pow2_scale(torch.tensor([6.0, 6.1, 5.9, 0.75, 96]), 6.0).tolist() == [1, 2, 1, 0.125, 16]


def test_b05_one_last_place_above_a_power_of_two_doubles_the_scale() -> None:
    x = torch.tensor([1024 * (1 + 2.0**-23), 1024.0, 2.0**-120 * (1 + 2.0**-23)])
    assert formats.pow2_scale(x, 1.0).tolist() == [2048.0, 1024.0, 2.0**-119]


def test_b06_an_exact_power_of_two_is_not_doubled() -> None:
    rows = torch.zeros(2, 128)
    rows[0, 5], rows[1, 5] = 448.0, 224.0
    codes, scale = formats.quantize_fp8(rows, 128)
    assert formats.decode_ue8m0(scale).flatten().tolist() == [1.0, 0.5]
    assert codes.view(torch.uint8)[:, 5].tolist() == [0x7E, 0x7E]


@pytest.mark.parametrize("fmax", [448.0, 240.0, 6.0])
def test_a_maximum_of_exactly_max_times_a_power_of_two_gives_that_power(fmax: float) -> None:
    # exponents for which the product is a normal float32 and the maximum finite
    powers = torch.tensor([2.0**n for n in range(-120, 119)])
    assert torch.equal(formats.pow2_scale(powers * fmax, fmax), powers)


@given(
    st.floats(min_value=2.0**-149, max_value=3.4028234663852886e38, width=32),
    st.sampled_from([448.0, 240.0, 6.0, 1.0]),
)
def test_the_scale_is_the_smallest_power_of_two_not_below_the_float32_product(amax: float, fmax: float) -> None:
    product = Fraction(float(np.float32(amax) * np.float32(1 / fmax)))
    scale = formats.pow2_scale(torch.tensor([amax]), fmax)[0]
    if product > Fraction(2) ** 127:
        assert scale.isnan()
        return
    power = Fraction(float(scale))
    assert power >= product
    assert power / 2 < product or power == Fraction(2) ** -127
    assert math.frexp(float(power))[0] == 0.5


@pytest.mark.parametrize("carrier", [torch.bfloat16, torch.float64])
def test_the_scale_reads_any_carrier_as_float32(carrier: torch.dtype) -> None:
    amax = torch.tensor([448.0, 450.0, 3.5]).to(carrier)
    assert formats.pow2_scale(amax, 448.0).tolist() == [1.0, 2.0, 2.0**-7]


def test_a_maximum_that_is_not_finite_gives_a_nan_scale() -> None:
    assert formats.pow2_scale(torch.tensor([math.inf, math.nan, -math.nan]), 448.0).isnan().all()
