"""Block scaling on top of the element formats: activations, state rows, weights, Hadamard rotation (spec §3.2-3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import InputError
from hal_ops import formats
from hal_ops.numerics import up


def _blocks(x: Tensor, block: int) -> Tensor:
    """x [..., K] -> [..., K/block, block]."""
    if block < 1 or x.shape[-1] % block:
        raise InputError(f"last axis K = {x.shape[-1]} is no multiple of block = {block}")
    return x.unflatten(-1, (x.shape[-1] // block, block))


def quantize_fp8(
    x: Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn, amax_floor: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] -> codes FP8 [..., K] and scale UE8M0 [..., K/block].

    The scale is the smallest power of two that fits the block's maximum, floored at ``amax_floor`` (spec §3.3).
    """
    v = up(_blocks(x, block))
    scale = formats.pow2_scale(v.abs().amax(-1).clamp(min=amax_floor), formats.e4m3_format(dtype).max)
    codes = formats.encode_e4m3(v.double() / scale.double()[..., None], dtype)
    return codes.flatten(-2), formats.encode_ue8m0(scale)


def dequantize_fp8(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Codes FP8 [..., K] and scale [..., K/block] -> float32 [..., K], exact."""
    return (_blocks(formats.decode_e4m3(codes), block) * formats.decode_scale(scale)[..., None]).flatten(-2)


def fake_quantize_fp8(x: Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x [..., K] rounded to FP8 values times block scales, in x's own dtype (spec §3.4)."""
    return dequantize_fp8(*quantize_fp8(x, block, dtype), block).to(x.dtype)


def quantize_fp4(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] -> packed E2M1 int8 [..., K/2] and scale UE8M0 [..., K/block]; floor 6·2^-126 (spec §3.4)."""
    v = up(_blocks(x, block))
    scale = formats.pow2_scale(v.abs().amax(-1).clamp(min=6 * 2.0**-126), 6.0)
    codes = formats.encode_e2m1(v.double() / scale.double()[..., None])
    return formats.pack_e2m1(codes.flatten(-2)), formats.encode_ue8m0(scale)


def fake_quantize_fp4(x: Tensor, block: int = 32) -> Tensor:
    """x [..., K] rounded to E2M1 values times block scales, in x's own dtype (spec §3.4)."""
    packed, scale = quantize_fp4(x, block)
    return (
        (_blocks(formats.unpack_e2m1(packed), block) * formats.decode_scale(scale)[..., None]).flatten(-2).to(x.dtype)
    )


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] -> symmetric int8 [..., K] and float32 scale [..., 1]; an all-zero row has scale 1."""
    amax = up(x).abs().amax(-1, keepdim=True).to(torch.float32)
    scale = torch.where(amax > 0, amax * torch.tensor(1 / 127.0, dtype=torch.float32, device=x.device), 1.0)
    return (up(x) / scale.to(up(x).dtype)).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 [..., K] times float32 scale [..., 1] -> float32 [..., K]."""
    return codes.to(torch.float32) * scale


def dequantize_weight_fp8(w: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """Weight FP8 [..., N, K] with scale [..., ceil(N/block), ceil(K/block)] -> float32 [..., N, K], exact.

    Raises:
        InputError: the scale's shape does not belong to the weight's (fault B64).
    """
    rows, cols = w.shape[-2:]
    right = (*w.shape[:-2], -(-rows // block), -(-cols // block))
    if tuple(scale.shape) != right:
        raise InputError(f"scale has shape {list(scale.shape)}, right for a weight {list(w.shape)} is {list(right)}")
    wide = formats.decode_scale(scale).repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)
    return formats.decode_e4m3(w) * wide[..., :cols]


def dequantize_weight_fp4(packed: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """Weight packed E2M1 [..., N, K/2] with scale [..., N, K/block] -> float32 [..., N, K], exact.

    Raises:
        InputError: the scale's shape does not belong to the weight's (fault B64).
    """
    right = (*packed.shape[:-1], packed.shape[-1] * 2 // block)
    if tuple(scale.shape) != right:
        raise InputError(f"scale has shape {list(scale.shape)}, right for packed {list(packed.shape)} is {list(right)}")
    return (_blocks(formats.unpack_e2m1(packed), block) * formats.decode_scale(scale)[..., None]).flatten(-2)


def fp4_to_fp8_weight(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 weight [N, K/2] with scales per 32 -> FP8 codes [N, K] with scales per 128x128, lossless (spec §3.2).

    Raises:
        InputError: scales inside one 128x128 block span more than 2^14, so that codes would be lost; the block is named.
    """
    rows, groups = scale.shape
    exponent = torch.frexp(formats.decode_scale(scale).double()).exponent
    tall, wide = -(-rows // 128), -(-groups // 4)
    padded = exponent.new_full((tall * 128, wide * 4), -(10**6))
    padded[:rows, :groups] = exponent
    tiles = padded.view(tall, 128, wide, 4)
    most = tiles.amax((1, 3))
    least = torch.where(tiles > -(10**6), tiles, 10**6).amin((1, 3))
    if bool((most - least > 14).any()):
        r, c = torch.nonzero(most - least > 14)[0].tolist()
        raise InputError(f"128x128 block [{r}, {c}]: scales span 2^{int((most - least)[r, c])}, right is at most 2^14")
    shift = tiles - most[:, None, :, None] + 6
    factor = torch.ldexp(torch.ones_like(shift, dtype=torch.float64), shift.clamp(min=-100))
    factor = factor.view(tall * 128, wide * 4)[:rows, :groups]
    values = _blocks(formats.unpack_e2m1(packed).double(), 32) * factor[..., None]
    new_scale = torch.ldexp(torch.ones_like(most, dtype=torch.float64), most - 1 - 6)
    return formats.encode_e4m3(values.flatten(-2), torch.float8_e4m3fn), formats.encode_ue8m0(new_scale)


def fn_to_fnuz(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FN codes and UE8M0 scales -> FNUZ codes and scales of the same value: a byte means half, so scales double.

    Raises:
        InputError: a NaN code (nothing in FNUZ means it safely), or a scale byte of 254 or 255, which cannot double (B63).
    """
    byte, exponent = w.view(torch.uint8), scale.view(torch.uint8)
    if bool(((byte & 0x7F) == 0x7F).any()):
        raise InputError("weight holds NaN codes (0x7F or 0xFF); right is finite codes before conversion to FNUZ")
    if bool((exponent >= 254).any()):
        raise InputError("UE8M0 scale byte 254 or 255 cannot be doubled for FNUZ; right is at most 253")
    codes = torch.where(byte == 0x80, 0, byte)  # negative zero is FNUZ's NaN
    return codes.view(torch.float8_e4m3fnuz), (exponent + 1).view(torch.float8_e8m0fnu)


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] times the Sylvester-ordered Hadamard matrix and n^-1/2, in x's dtype, one rounding (spec §3.4).

    Raises:
        InputError: n is no power of two.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise InputError(f"last axis n = {n}, right is a power of two")
    v, step = up(x), 1
    while step < n:
        pairs = v.unflatten(-1, (-1, 2, step))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return (v * n**-0.5).to(x.dtype)
