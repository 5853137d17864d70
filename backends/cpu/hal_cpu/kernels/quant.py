"""Quantisation on the CPU (spec §3.3, §3.4): bitwise the reference's results, by float32 arithmetic that is exact.

The scale comes from the exponent bits of the block's maximum, as in the reference. Since it is a power of two, dividing by
it is an exact multiplication; what underflows is below half of the format's least step and rounds to zero either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hal.contract import Call
from hal.errors import InputError
from hal.kernel import Claim, Range, Reason, kernel
from hal_cpu.kernels.common import FLOATS, PIECE, pieces
from hal_ops.formats import e4m3_format

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_CLAIM = Claim(dtypes={"x": FLOATS}, layouts={"x": "rows"})  # state rows are slices of wider ones


def _whole_blocks(call: Call) -> tuple[Reason, ...]:
    k, block = call.axes["K"], int(call.scalars["block"])
    if block < 1 or k % block:
        return (Reason("block-size", f"K = {k} is no multiple of block = {block}"),)
    return ()


def _powers(v: Floats, fmax: float, floor: float) -> Ints:
    """Biased exponents int32 [B, 1] of the scales of the blocks v float32 [B, block].

    Raises:
        InputError: NaN or infinity, which no scale fits.
    """
    amax = np.maximum(np.abs(v).max(axis=1, keepdims=True), np.float32(floor))
    if not amax.max() < np.inf:  # NaN compares false
        raise InputError("x holds NaN or infinity, which no block scale fits; right is finite values")
    # the smallest power of two not below the ratio: carry into the exponent unless the mantissa is zero
    power: Ints = ((amax * np.float32(1.0 / fmax)).view(np.int32) + 0x7FFFFF) >> 23
    return power


def _rounded(v: Floats, mantissa: int, least: int) -> Floats:
    """v rounded half to even to ``mantissa`` bits after the point, no finer than at exponent ``least``; keeps -0.

    Adding 1.5·2^(23-mantissa) times the value's own power of two leaves no room for lower bits.
    """
    magic = v.view(np.int32) & 0x7F800000
    np.maximum(magic, (127 + least) << 23, out=magic)
    magic += ((23 - mantissa) << 23) + 0x400000
    wide = magic.view(np.float32)
    out: Floats = np.copysign((v + wide) - wide, v)
    return out


def _blocks(x: Tensor, block: int) -> Iterator[tuple[slice, Floats]]:
    """The blocks of x [..., K] as float32 [B, block], in pieces, each with its place among all elements of x."""
    flat = x.reshape(-1)
    for part in pieces(flat.shape[0], 1, PIECE, block):
        yield part, flat[part].to(torch.float32).numpy().reshape(-1, block)


def _fake(x: Tensor, block: int, mantissa: int, least: int, fmax: float, floor: float) -> Tensor:
    """x [..., K] rounded to a format times block scales. Rounding to nearest never leaves a value above ``fmax``."""
    out = torch.empty(x.shape, dtype=x.dtype)
    flat = out.view(-1)
    for part, v in _blocks(x, block):
        power = _powers(v, fmax, floor)
        q = _rounded(v * ((254 - power) << 23).view(np.float32), mantissa, least)
        q *= (power << 23).view(np.float32)
        flat[part] = torch.from_numpy(q).view(-1)
    return out


@kernel("fake_quant_fp8", claim=_CLAIM, refuse=_whole_blocks, priority=10, evidence="hardware", reproducibility="R2")
def fake_quant_fp8(x: Tensor, block: int) -> Tensor:
    """Bitwise equal to the reference, and independent of the batch, for finite input."""
    return _fake(x, block, 3, -6, 448.0, 1e-4)


@kernel("fake_quant_fp4", claim=_CLAIM, refuse=_whole_blocks, priority=10, evidence="hardware", reproducibility="R2")
def fake_quant_fp4(x: Tensor, block: int) -> Tensor:
    """Bitwise equal to the reference, and independent of the batch, for finite input."""
    return _fake(x, block, 1, 0, 6.0, 6 * 2.0**-126)


@kernel("quant_act_fp8", claim=_CLAIM, refuse=_whole_blocks, priority=10, evidence="hardware", reproducibility="R2")
def quant_act_fp8(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bitwise equal to the reference; no value rounds above the maximum, so the cast never meets its overflow."""
    codes = torch.empty(x.shape, dtype=dtype)
    scale = torch.empty(x.shape[0], x.shape[1] // block, dtype=torch.uint8)
    flat, powers, fmax = codes.view(-1), scale.view(-1), e4m3_format(dtype).max
    for part, v in _blocks(x, block):
        power = _powers(v, fmax, 1e-4)
        powers[part.start // block : part.stop // block] = torch.from_numpy(power[:, 0])
        flat[part] = torch.from_numpy(v * ((254 - power) << 23).view(np.float32)).view(-1)
    return codes, scale.view(torch.float8_e8m0fnu)


@kernel("quant_act_int8", claim=_CLAIM, priority=10, evidence="hardware", reproducibility="R2")
def quant_act_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bitwise equal to the reference; it widens the rows once instead of three times."""
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], 1)
    for part in pieces(*x.shape):
        v = x[part].to(torch.float32).numpy()
        amax = np.abs(v).max(axis=1, keepdims=True)
        own = np.where(amax > 0, amax * np.float32(1 / 127.0), np.float32(1.0))
        scale[part] = torch.from_numpy(own)
        codes[part] = torch.from_numpy(np.clip(np.rint(v / own), -127, 127).astype(np.int8))
    return codes, scale


@lru_cache(maxsize=8)
def _sylvester(n: int) -> Tensor:
    """The Hadamard matrix float32 [n, n] of ±1 in Sylvester order."""
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


@kernel(
    "hadamard",
    claim=Claim(dtypes={"x": FLOATS}, axes={"n": Range(2, 256)}),
    refuse=lambda c: (
        ()
        if c.axes["n"] & (c.axes["n"] - 1) == 0
        else (Reason("power-of-two", f"n = {c.axes['n']} is no power of two"),)
    ),
    priority=10,
    evidence="hardware",
    reproducibility="R1",
)
def hadamard(x: Tensor) -> Tensor:
    """One product with the matrix: n multiplications by ±1 cost less than log2(n) passes over memory."""
    n = x.shape[-1]
    return (x.reshape(-1, n).to(torch.float32) @ _sylvester(n)).mul_(n**-0.5).to(x.dtype).view(x.shape)
