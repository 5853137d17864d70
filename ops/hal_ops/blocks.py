"""Block scaling on top of the element formats: activations, state rows, weights, Hadamard rotation (spec §3.2-3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.contract import dtype_name
from hal.errors import InputError
from hal_ops import formats
from hal_ops.numerics import up


def _blocks(x: Tensor, block: int) -> Tensor:
    """x [..., K] -> [..., K/block, block]."""
    if block < 1 or x.shape[-1] % block:
        raise InputError(f"last axis K = {x.shape[-1]} is no multiple of block = {block}")
    return torch.unflatten(x, -1, (x.shape[-1] // block, block))


def _scaled(x: Tensor, block: int, floor: float, fmax: float) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] over its block scales [..., K/block, block], exact, and the scales UE8M0 [..., K/block]."""
    v = up(_blocks(x, block))
    scale = formats.pow2_bytes(v.abs().amax(-1).to(torch.float32).clamp(min=floor), fmax)
    return v / formats.decode_ue8m0(scale)[..., None], scale


def _rescaled(values: Tensor, scale: Tensor, block: int) -> Tensor:
    """values float32 [..., K] times scale [..., K/block]."""
    return (_blocks(values, block) * formats.decode_scale(scale)[..., None]).flatten(-2)


def quantize_fp8(
    x: Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn, amax_floor: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] -> codes FP8 [..., K] and scale UE8M0 [..., K/block].

    The scale is the smallest power of two that fits the block's float32 maximum, floored at ``amax_floor`` (spec §3.3). A
    block that holds NaN or infinity has a NaN scale.

    Raises:
        InputError: K is no multiple of ``block``, or ``dtype`` is no E4M3 dialect.
    """
    ratio, scale = _scaled(x, block, amax_floor, formats.e4m3_format(dtype).max)
    return formats.encode_e4m3(ratio, dtype).flatten(-2), scale


def dequantize_fp8(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Codes FP8 [..., K] and scale [..., K/block] -> float32 [..., K], exact."""
    return _rescaled(formats.decode_e4m3(codes), scale, block)


def fake_quantize_fp8(x: Tensor, block: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x [..., K] rounded to FP8 values times block scales, in x's own dtype (spec §3.4)."""
    return dequantize_fp8(*quantize_fp8(x, block, dtype), block).to(x.dtype)


def quantize_fp4(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] -> packed E2M1 int8 [..., K/2] and scale UE8M0 [..., K/block]; floor 6·2^-126 (spec §3.4).

    Raises:
        InputError: K is odd or no multiple of ``block``.
    """
    ratio, scale = _scaled(x, block, 6 * 2.0**-126, 6.0)
    return formats.pack_e2m1(formats.round_e2m1(ratio).flatten(-2)), scale


def fake_quantize_fp4(x: Tensor, block: int = 32) -> Tensor:
    """x [..., K] rounded to E2M1 values times block scales, in x's own dtype (spec §3.4)."""
    packed, scale = quantize_fp4(x, block)
    return _rescaled(formats.unpack_e2m1(packed), scale, block).to(x.dtype)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x carrier [..., K] -> symmetric int8 [..., K] in ±127 and float32 scale [..., 1], all arithmetic in float32.

    scale = max|x| · fp32(1/127), code = nearest even of x / scale. A row of zeros has scale 1; one that holds NaN or
    infinity has a scale that is not finite and codes 0, so that it decodes to NaN.
    """
    v = x.to(torch.float32)
    scale = v.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127.0, dtype=torch.float32, device=x.device)
    scale = torch.where(scale == 0, 1.0, scale)  # also where a subnormal maximum underflows
    codes = (v / scale).round().clamp(-127, 127)
    return torch.where(scale.isfinite(), codes, 0.0).to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 [..., K] times float32 scale [..., 1] -> float32 [..., K]."""
    return codes.to(torch.float32) * scale


def _check_scale(scale: Tensor, right: tuple[int, ...], kind: str, weight: Tensor) -> None:
    if tuple(scale.shape) != right:
        raise InputError(
            f"scale has shape {list(scale.shape)}, right for {kind} weight {list(weight.shape)} is {list(right)}"
        )


def dequantize_weight_fp8(w: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Weight FP8 [..., N, K], scale [..., ceil(N/block[0]), ceil(K/block[1])] -> float32 [..., N, K], exact.

    Raises:
        InputError: ``w`` is of no E4M3 dtype, or the scale's shape does not belong to the weight's (faults B04, B64).
    """
    (rows, cols), (high, wide) = w.shape[-2:], block
    _check_scale(scale, (*w.shape[:-2], -(-rows // high), -(-cols // wide)), "FP8", w)
    factor = formats.decode_scale(scale).repeat_interleave(high, -2)[..., :rows, :]
    return formats.decode_e4m3(w) * factor.repeat_interleave(wide, -1)[..., :cols]


def dequantize_weight_fp4(packed: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """Weight packed E2M1 [..., N, K/2] with scale [..., N, K/block] -> float32 [..., N, K], exact.

    Raises:
        InputError: the scale's shape does not belong to the weight's (fault B64).
    """
    _check_scale(scale, (*packed.shape[:-1], packed.shape[-1] * 2 // block), "packed FP4", packed)
    return _rescaled(formats.unpack_e2m1(packed), scale, block)


def _scale_bytes(scale: Tensor) -> Tensor:
    """Exponent bytes int32 [...] of a scale, UE8M0 or float32 powers of two."""
    coded = scale if scale.dtype == torch.float8_e8m0fnu else formats.encode_ue8m0(formats.decode_scale(scale))
    return coded.view(torch.uint8).to(torch.int32)


def _tile_extremes(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Exponent bytes [N, K/32] -> largest and smallest of every 128x128 block, each [ceil(N/128), ceil(K/128)]."""
    rows, groups = exponents.shape
    tall, wide = -(-rows // 128), -(-groups // 4)

    def tiles(fill: int) -> Tensor:
        padded = exponents.new_full((tall * 128, wide * 4), fill)
        padded[:rows, :groups] = exponents
        return padded.view(tall, 128, wide, 4)

    return tiles(-1).amax((1, 3)), tiles(256).amin((1, 3))


def fp4_to_fp8_weight(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 weight [N, K/2], scale [N, K/32] -> FP8 FN codes [N, K], scale UE8M0 [ceil(N/128), ceil(K/128)], lossless.

    The new scale is the block's largest times 2^-6, the new code the value times old/new (spec §3.2).

    Raises:
        InputError: scales inside one 128x128 block span more than 2^14 (codes would be lost), are NaN, or the new scale
            would be below 2^-127; the block is named.
    """
    _check_scale(scale, (packed.shape[0], packed.shape[1] * 2 // 32), "packed FP4", packed)
    old = _scale_bytes(scale)
    most, least = _tile_extremes(old)
    for wrong, seen, right in (
        (most == 255, "hold NaN (byte 255)", "finite scales"),
        (most - least > 14, "span more than 2^14", "at most 2^14, for a conversion without loss"),
        (most < 6, "are below 2^-121", "at least that, since the new scale is 2^-6 of the largest"),
    ):
        if bool(wrong.any()):
            row, col = torch.nonzero(wrong)[0].tolist()
            raise InputError(f"128x128 block [{row}, {col}]: its FP4 scales {seen}; right is {right}")
    new = most - 6
    spread = new.repeat_interleave(128, 0)[: old.shape[0]].repeat_interleave(4, 1)[:, : old.shape[1]]
    factor = (old - spread + 127).to(torch.uint8)
    codes = formats.encode_e4m3(_rescaled(formats.unpack_e2m1(packed), factor, 32), torch.float8_e4m3fn)
    return codes, new.to(torch.uint8).view(torch.float8_e8m0fnu)


def _doubled(scale: Tensor) -> Tensor:
    """Twice the scale in its own dtype: UE8M0 by its exponent byte, for which no arithmetic exists (B63)."""
    if scale.dtype == torch.float32:
        twice = scale * 2
        if not bool(twice.isfinite().all()):
            raise InputError("a float32 scale cannot be doubled for FNUZ; right is a finite scale below 2^127")
        return twice
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise InputError(f"scale is {dtype_name(scale.dtype)}, right is float8_e8m0fnu or float32")
    byte = scale.view(torch.uint8)
    if bool((byte >= 254).any()):
        raise InputError("UE8M0 scale byte 254 or 255 cannot be doubled for FNUZ; right is at most 253")
    return (byte + 1).view(scale.dtype)


def fn_to_fnuz(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FN codes and scales -> FNUZ codes and scales (same shapes and scale dtype) of the same value.

    A byte means half as much in FNUZ, so scales double; -0 becomes +0, since its byte is FNUZ's NaN.

    Raises:
        InputError: ``w`` is not ``float8_e4m3fn``, holds NaN codes (0x7F means 240 in FNUZ), or a scale cannot double (B63).
    """
    if w.dtype != torch.float8_e4m3fn:
        raise InputError(f"weight is {dtype_name(w.dtype)}, right is float8_e4m3fn for conversion to FNUZ")
    byte = w.view(torch.uint8)
    if bool(((byte & 0x7F) == 0x7F).any()):
        raise InputError("weight holds NaN codes (0x7F or 0xFF); right is finite codes before conversion to FNUZ")
    return torch.where(byte == 0x80, 0, byte).view(torch.float8_e4m3fnuz), _doubled(scale)


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] times the Sylvester-ordered Hadamard matrix and n^-1/2, in x's dtype, one rounding (spec §3.4).

    Raises:
        InputError: n is no power of two.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise InputError(f"last axis n = {n}, right is a power of two")
    v: Tensor = up(x)
    step = 1
    while step < n:
        pairs = torch.unflatten(v, -1, (n // (2 * step), 2, step))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    factor: float = n**-0.5
    return (v * factor).to(x.dtype)
