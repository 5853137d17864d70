"""Number formats, bit-exact on every device: FP8 E4M3 in both dialects, FP4 E2M1, UE8M0 scales, INT8 (spec §3).

Encoding goes through tables and exponent bits, never through a framework's cast: casts differ between devices in how they
saturate, flush and treat the one NaN of FNUZ. Block scaling is in :mod:`hal_ops.blocks` and re-exported here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hal.contract import dtype_name
from hal.errors import InputError


@dataclass(frozen=True)
class Format:
    """A stored number format: dtype of its codes, largest finite value, bits of one code."""

    name: str
    dtype: torch.dtype
    max: float
    bits: int


FORMATS: dict[str, Format] = {
    "e4m3fn": Format("e4m3fn", torch.float8_e4m3fn, 448.0, 8),
    "e4m3fnuz": Format("e4m3fnuz", torch.float8_e4m3fnuz, 240.0, 8),
    "e2m1": Format("e2m1", torch.int8, 6.0, 4),
    "ue8m0": Format("ue8m0", torch.float8_e8m0fnu, 2.0**127, 8),
    "int8": Format("int8", torch.int8, 127.0, 8),
}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_format(dtype: torch.dtype) -> Format:
    """The E4M3 dialect that ``dtype`` is.

    Raises:
        InputError: ``dtype`` is neither ``float8_e4m3fn`` nor ``float8_e4m3fnuz``.
    """
    for fmt in (FORMATS["e4m3fn"], FORMATS["e4m3fnuz"]):
        if fmt.dtype == dtype:
            return fmt
    raise InputError(f"dtype {dtype_name(dtype)} is no E4M3 dialect, right is float8_e4m3fn or float8_e4m3fnuz")


def _e4m3_value(byte: int, fnuz: bool) -> float:
    """The value of one E4M3 code, from the format's definition."""
    if byte == 0x80 and fnuz:
        return float("nan")
    if byte & 0x7F == 0x7F and not fnuz:
        return float("nan")
    bias = 8 if fnuz else 7
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = mantissa * 2.0 ** (-2 - bias) if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - bias - 3)
    return -magnitude if byte & 0x80 else magnitude


@lru_cache(maxsize=16)
def _e4m3_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    fnuz = e4m3_format(dtype).name == "e4m3fnuz"
    return torch.tensor([_e4m3_value(b, fnuz) for b in range(256)], dtype=torch.float32, device=device)


def decode_e4m3(code: Tensor) -> Tensor:
    """Codes FP8 [...] -> float32 [...]; the dialect is the tensor's dtype, never a guess (faults B01-B03)."""
    table = _e4m3_table(e4m3_format(code.dtype).dtype, code.device)
    return table[code.view(torch.uint8).int()]


def encode_e4m3(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x [...] to nearest even in the dialect, saturating at its maximum; NaN gives NaN.

    FNUZ has no negative zero (its byte is the NaN), so an underflowing negative becomes +0 (fault B02).
    """
    fmt = e4m3_format(dtype)
    fnuz = fmt.name == "e4m3fnuz"
    v = x.to(torch.float64)
    magnitude = v.abs().clamp(max=fmt.max)
    least = -7 if fnuz else -6
    exponent = torch.frexp(magnitude).exponent.clamp(min=least + 1) - 1  # floor(log2), at least the least normal's
    steps = torch.ldexp(magnitude, 3 - exponent).round()  # mantissa in steps of the last place: round is half to even
    carried = steps == 16
    exponent, steps = exponent + carried, torch.where(carried, 8.0, steps)
    normal = steps >= 8
    bias = 8 if fnuz else 7
    byte = torch.where(normal, (exponent + bias) * 8 + steps - 8, steps).to(torch.uint8)
    sign = torch.signbit(v) & ~((byte == 0) & fnuz)
    byte = torch.where(sign, byte | 0x80, byte)
    return torch.where(v.isnan(), 0x80 if fnuz else 0x7F, byte).to(torch.uint8).view(dtype)


def encode_e2m1(x: Tensor) -> Tensor:
    """Round x [...] to nearest, ties to the even code, clamped to ±6 -> codes uint8 [...], bit 3 the sign.

    Raises:
        InputError: NaN, which the format cannot hold.
    """
    if bool(x.isnan().any()):
        raise InputError("x holds NaN, which E2M1 cannot hold; right is finite values")
    v = x.to(torch.float64)
    magnitude = v.abs().clamp(max=6.0)
    code = torch.zeros(v.shape, dtype=torch.uint8, device=x.device)
    for low, (a, b) in enumerate(itertools.pairwise(E2M1_VALUES)):
        middle = (a + b) / 2
        code += ((magnitude > middle) | ((magnitude == middle) & (low % 2 == 1))).to(torch.uint8)
    return code | (torch.signbit(v).to(torch.uint8) << 3)


@lru_cache(maxsize=8)
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=device)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 [...] in 0..15 -> float32 [...]."""
    return _e2m1_table(codes.device)[codes.int()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 [..., K] -> int8 [..., K/2], the even element in the low nibble."""
    if codes.shape[-1] % 2:
        raise InputError(f"last axis K = {codes.shape[-1]}, right is an even number to pack two codes a byte")
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., K/2] (int8 or uint8) -> float32 [..., K]."""
    if packed.dtype not in (torch.int8, torch.uint8):
        raise InputError(f"packed E2M1 is {dtype_name(packed.dtype)}, right is int8 or uint8")
    byte = packed.view(torch.uint8)
    return decode_e2m1(torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2))


@lru_cache(maxsize=8)
def _ue8m0_table(device: torch.device) -> Tensor:
    # byte 0 is 2^-127, a float32 subnormal: a table cannot be flushed by arithmetic (fault B08)
    values = [2.0 ** (b - 127) for b in range(255)] + [float("nan")]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(device)


def decode_ue8m0(scale: Tensor) -> Tensor:
    """Scale bytes [...] (float8_e8m0fnu or uint8) -> float32: byte b is 2^(b-127), 255 is NaN."""
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise InputError(f"UE8M0 scale is {dtype_name(scale.dtype)}, right is float8_e8m0fnu or uint8")
    return _ue8m0_table(scale.device)[scale.view(torch.uint8).int()]


def decode_scale(scale: Tensor) -> Tensor:
    """A scale as float values: float32 and float64 pass through, UE8M0 is decoded, anything else is refused."""
    return scale if scale.dtype in (torch.float32, torch.float64) else decode_ue8m0(scale)


def encode_ue8m0(x: Tensor) -> Tensor:
    """Powers of two float [...] -> float8_e8m0fnu [...].

    Raises:
        InputError: a value that is no power of two in 2^-127 … 2^127; the message shows it.
    """
    mantissa, exponent = torch.frexp(x.to(torch.float64))
    wrong = (mantissa != 0.5) | (exponent < -126) | (exponent > 128)
    if bool(wrong.any()):
        raise InputError(f"scale {float(x[wrong][0])!r} is no power of two from 2^-127 to 2^127")
    return (exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)


def pow2_scale(amax: Tensor, fmax: float) -> Tensor:
    """Smallest power of two not below ``amax · fp32(1/fmax)``, by exponent bits: exact where log2 is not (B05, B06).

    Args:
        amax: block maxima, any float dtype; read as float32.
        fmax: largest finite value of the target format.
    """
    ratio = amax.to(torch.float32) * torch.tensor(1.0 / fmax, dtype=torch.float32, device=amax.device)
    bits = ratio.view(torch.int32)
    byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return _ue8m0_table(amax.device)[byte]


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
