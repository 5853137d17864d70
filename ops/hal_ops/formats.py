"""Number formats, bit-exact on every device: FP8 E4M3 in both dialects, FP4 E2M1, UE8M0 scales, INT8 (spec §3.1-3.3).

Codes are looked up in tables that are built from the formats' definitions with integers alone; a framework's cast is never
used, since casts differ between devices in how they saturate, flush and treat the one NaN of FNUZ. Block scaling is in
:mod:`hal_ops.blocks` and re-exported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hal.contract import dtype_name
from hal.errors import InputError


@dataclass(frozen=True)
class Format:
    """A stored number format: dtype of its codes, largest finite value, bits of one code; mantissa bits and bias of a float."""

    name: str
    dtype: torch.dtype
    max: float
    bits: int
    mantissa: int = 0
    bias: int = 0


FORMATS: dict[str, Format] = {
    "e4m3fn": Format("e4m3fn", torch.float8_e4m3fn, 448.0, 8, 3, 7),
    "e4m3fnuz": Format("e4m3fnuz", torch.float8_e4m3fnuz, 240.0, 8, 3, 8),
    "e2m1": Format("e2m1", torch.int8, 6.0, 4, 1, 1),
    "ue8m0": Format("ue8m0", torch.float8_e8m0fnu, 2.0**127, 8, 0, 127),
    "int8": Format("int8", torch.int8, 127.0, 8),
}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: code of NaN; E2M1 has none
_NAN = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80}
_TOP = {"e4m3fn": 0x7E, "e4m3fnuz": 0x7F, "e2m1": 7}


def e4m3_format(dtype: torch.dtype) -> Format:
    """The E4M3 dialect that ``dtype`` is.

    Raises:
        InputError: ``dtype`` is neither ``float8_e4m3fn`` nor ``float8_e4m3fnuz``.
    """
    for fmt in (FORMATS["e4m3fn"], FORMATS["e4m3fnuz"]):
        if fmt.dtype == dtype:
            return fmt
    raise InputError(f"dtype {dtype_name(dtype)} is no E4M3 dialect, right is float8_e4m3fn or float8_e4m3fnuz")


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _value(fmt: Format, code: int) -> float:
    """The value of one code of a float format, from the format's definition."""
    sign, magnitude = code >> (fmt.bits - 1), code & ((1 << (fmt.bits - 1)) - 1)
    if code == _NAN.get(fmt.name) or magnitude > _TOP[fmt.name]:
        return float("nan")
    exponent, mantissa = magnitude >> fmt.mantissa, magnitude & ((1 << fmt.mantissa) - 1)
    steps = mantissa + ((1 << fmt.mantissa) if exponent else 0)
    value = steps * 2.0 ** (max(exponent, 1) - fmt.bias - fmt.mantissa)
    return -value if sign else value


@lru_cache(maxsize=16)
def _decode_table(name: str, device: torch.device) -> Tensor:
    fmt = FORMATS[name]
    return torch.tensor([_value(fmt, c) for c in range(1 << fmt.bits)], dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _encode_table(name: str, device: torch.device) -> Tensor:
    """Code of every bfloat16 bit pattern, uint8 [65536]: round to nearest even after the clamp to ±max, by integers."""
    fmt = FORMATS[name]
    key = torch.arange(1 << 16, dtype=torch.int32)
    magnitude = key & 0x7FFF
    field = magnitude >> 7
    significand = (magnitude & 0x7F) | ((field > 0).to(torch.int32) << 7)
    exponent = field.clamp(min=1) - 127
    floor = exponent.clamp(min=1 - fmt.bias)  # below the least normal the step no longer shrinks
    drop = (floor - exponent + 7 - fmt.mantissa).clamp(max=9)
    steps = (significand + (1 << (drop - 1)) - 1 + ((significand >> drop) & 1)) >> drop
    # a carry into the next exponent adds up by itself, as does the least normal reached from below
    code = (steps + ((floor - 1 + fmt.bias) << fmt.mantissa)).clamp(max=_TOP[name])
    signed = (key >= 0x8000) & ~((code == 0) & (name == "e4m3fnuz"))  # FNUZ has no negative zero: fault B02
    code |= signed.to(torch.int32) << (fmt.bits - 1)
    return torch.where(magnitude > 0x7F80, _NAN.get(name, 0), code).to(torch.uint8).to(device)


def _key(x: Tensor) -> Tensor:
    """bfloat16 bit pattern of x [...] rounded to odd, int32: no later rounding to fewer bits can tell it from x."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) & 0xFFFF
    narrow = x.to(torch.float32)
    pattern = narrow.contiguous().view(torch.int32)
    if x.dtype == torch.float64:
        wide = narrow.to(torch.float64)
        pattern = (pattern - (wide.abs() > x.abs()).to(torch.int32)) | (wide != x).to(torch.int32)
    return ((pattern >> 16) & 0xFFFF) | ((pattern & 0xFFFF) != 0).to(torch.int32)


def decode_e4m3(code: Tensor) -> Tensor:
    """Codes FP8 [...] -> float32 [...]; the dialect is the tensor's dtype, never a guess (faults B01-B04).

    Raises:
        InputError: ``code`` is of no E4M3 dtype.
    """
    table = _decode_table(e4m3_format(code.dtype).name, code.device)
    return _look_up(table, code.view(torch.uint8).to(torch.int32))


def encode_e4m3(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x [...] to nearest even in the dialect, saturating at its maximum (infinities too); NaN gives NaN.

    FNUZ has no negative zero (its byte is the NaN), so an underflowing negative becomes +0 (fault B02).

    Raises:
        InputError: ``dtype`` is no E4M3 dialect.
    """
    return _look_up(_encode_table(e4m3_format(dtype).name, x.device), _key(x)).view(dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """As :func:`encode_e2m1`, with code 0 for NaN: for blocks whose scale is NaN already."""
    return _look_up(_encode_table("e2m1", x.device), _key(x))


def encode_e2m1(x: Tensor) -> Tensor:
    """Round x [...] to nearest, ties to the even code, clamped to ±6 -> codes uint8 [...], bit 3 the sign, of zero too.

    Raises:
        InputError: NaN, which the format cannot hold.
    """
    if bool(x.isnan().any()):
        raise InputError("x holds NaN, which E2M1 cannot hold; right is finite values")
    return round_e2m1(x)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 [...] in 0..15 -> float32 [...]."""
    return _look_up(_decode_table("e2m1", codes.device), codes.to(torch.int32))


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 [..., K] -> int8 [..., K/2], the even element in the low nibble.

    Raises:
        InputError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise InputError(f"last axis K = {codes.shape[-1]}, right is an even number to pack two codes a byte")
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., K/2] (int8 or uint8) -> float32 [..., K].

    Raises:
        InputError: ``packed`` is of another dtype.
    """
    if packed.dtype not in (torch.int8, torch.uint8):
        raise InputError(f"packed E2M1 is {dtype_name(packed.dtype)}, right is int8 or uint8")
    byte = packed.view(torch.uint8)
    return decode_e2m1(torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2))


@lru_cache(maxsize=8)
def _ue8m0_table(device: torch.device) -> Tensor:
    # byte 0 is 2^-127, a float32 subnormal: built from bits, so that no arithmetic can flush it (fault B08)
    bits = [0x00400000, *(b << 23 for b in range(1, 255)), 0x7FC00000]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(device)


def decode_ue8m0(scale: Tensor) -> Tensor:
    """Scale bytes [...] (float8_e8m0fnu or uint8) -> float32: byte b is 2^(b-127), 255 is NaN.

    Raises:
        InputError: ``scale`` is of another dtype.
    """
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise InputError(f"UE8M0 scale is {dtype_name(scale.dtype)}, right is float8_e8m0fnu or uint8")
    return _look_up(_ue8m0_table(scale.device), scale.view(torch.uint8).to(torch.int32))


def decode_scale(scale: Tensor) -> Tensor:
    """A scale as float values: float32 and float64 pass through, UE8M0 is decoded, anything else is refused (B20)."""
    return scale if scale.dtype in (torch.float32, torch.float64) else decode_ue8m0(scale)


def encode_ue8m0(x: Tensor) -> Tensor:
    """Powers of two float [...] -> float8_e8m0fnu [...]; NaN gives byte 255.

    Raises:
        InputError: a value that is no power of two in 2^-127 … 2^127; the message shows it.
    """
    narrow = x.to(torch.float32)
    bits = narrow.contiguous().view(torch.int32)
    byte = bits >> 23
    power = ((bits & 0x7FFFFF) == 0) & (byte > 0) & (byte < 255) & (narrow.to(x.dtype) == x)
    wrong = ~(power | (bits == 0x00400000) | x.isnan())
    if bool(wrong.any()):
        raise InputError(f"scale {float(x[wrong][0])!r} is no power of two from 2^-127 to 2^127")
    return torch.where(x.isnan(), 255, byte).to(torch.uint8).view(torch.float8_e8m0fnu)


def pow2_bytes(amax: Tensor, fmax: float) -> Tensor:
    """UE8M0 scale float8_e8m0fnu [...] of block maxima [...]: :func:`pow2_scale` before decoding."""
    ratio = amax.to(torch.float32) * torch.tensor(1.0 / fmax, dtype=torch.float32, device=amax.device)
    bits = ratio.contiguous().view(torch.int32) & 0x7FFFFFFF
    mantissa, byte = bits & 0x7FFFFF, bits >> 23
    least = torch.where(byte == 0, 0x400000, 0)  # a subnormal up to 2^-127 has byte 0
    return (byte + (mantissa > least).to(torch.int32)).clamp(max=255).to(torch.uint8).view(torch.float8_e8m0fnu)


def pow2_scale(amax: Tensor, fmax: float) -> Tensor:
    """Smallest power of two, from 2^-127, not below the float32 product ``amax · fp32(1/fmax)`` -> float32 [...].

    By exponent bits, plus one if any mantissa bit is set: exact where log2 is not (B05), and an exact power of two is not
    doubled (B06). A maximum that is not finite gives NaN, so that a damaged block cannot pass for a good one.

    Args:
        amax: block maxima [...] >= 0, any float dtype; read as float32.
        fmax: largest finite value of the target format.
    """
    return decode_ue8m0(pow2_bytes(amax, fmax))


from hal_ops.blocks import (  # noqa: E402  (blocks builds on the element formats above)
    dequantize_fp8,
    dequantize_int8,
    dequantize_weight_fp4,
    dequantize_weight_fp8,
    fake_quantize_fp4,
    fake_quantize_fp8,
    fn_to_fnuz,
    fp4_to_fp8_weight,
    hadamard,
    quantize_fp4,
    quantize_fp8,
    quantize_int8,
)

__all__ = [
    "E2M1_VALUES",
    "FORMATS",
    "Format",
    "decode_e2m1",
    "decode_e4m3",
    "decode_scale",
    "decode_ue8m0",
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_weight_fp4",
    "dequantize_weight_fp8",
    "e4m3_format",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue8m0",
    "fake_quantize_fp4",
    "fake_quantize_fp8",
    "fn_to_fnuz",
    "fp4_to_fp8_weight",
    "hadamard",
    "pack_e2m1",
    "pow2_scale",
    "quantize_fp4",
    "quantize_fp8",
    "quantize_int8",
    "unpack_e2m1",
]
