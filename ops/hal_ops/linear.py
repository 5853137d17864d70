"""Linear layers in every stored format (spec §3.2, §3.3). Weights are row-major [out, in]; y = x·Wᵀ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.contract import Call
from hal.operator import Cost, Judge, operator
from hal_ops import formats
from hal_ops.numerics import accumulator, up
from hal_ops.quant import quant_act_fp8, quant_act_int8
from hal_ops.samples import FLASH, PRO, Draw, grid

BLOCK = 128


def _pairs() -> list[dict[str, Any]]:
    """The [N, K] of every dense FP8 linear of Flash and Pro, at decode and (long run) prefill sizes."""
    shapes = []
    for g in (FLASH, PRO):
        wide = g["H"] * g["d"]
        shapes += [(g["Q"], g["D"]), (wide, g["Q"]), (512, g["D"]), (g["D"], g["G"] * g["O"]), (g["D"], g["I"])]
    out: list[dict[str, Any]] = [{"T": 1, "N": n, "K": k, "full": n * k >= 2**22} for n, k in shapes]
    out += [{"T": t, "N": n, "K": k, "full": True} for t in (64, 1024) for n, k in shapes]
    return out + [{"T": t, "N": 192, "K": 256} for t in (0, 1, 5)]


def _gemm(unit: str) -> Any:
    return lambda c: Cost({unit: 2.0 * c.axes["T"] * c.axes["N"] * c.axes["K"]})


def fp8_weight(draw: Draw, name: str, *shape: int) -> tuple[Tensor, Tensor]:
    """An FP8 weight [..., N, K] and its UE8M0 scale per 128x128 block."""
    codes = formats.encode_e4m3(draw.f32(name, *shape) * 64, torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    exponent = draw.ints(f"{name}.scale", *blocks, low=-13, high=-9).float()
    return codes, formats.encode_ue8m0(torch.exp2(exponent))


def fp4_weight(draw: Draw, name: str, *shape: int) -> tuple[Tensor, Tensor]:
    """A packed FP4 weight [..., N, K/2] and its UE8M0 scale per row and 32 of K."""
    codes = draw.ints(name, *shape, high=16).to(torch.uint8)
    exponent = draw.ints(f"{name}.scale", *shape[:-1], shape[-1] // 32, low=-8, high=-5).float()
    return formats.pack_e2m1(codes), formats.encode_ue8m0(torch.exp2(exponent))


def _dense_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    return draw.act("x", T, K), draw.weight("weight", N, K)


@operator(
    "x[T,K]:act, weight[N,K]:act -> y[T,N]:x",
    cost=_gemm("bf16"),
    judge=Judge("bound", "K"),
    samples=grid(_dense_inputs, _pairs()),
)
def linear_dense(x: Tensor, weight: Tensor) -> Tensor:
    """Dense linear: float32 accumulation, one rounding to the carrier. x carrier [T, K], weight [N, K] -> [T, N]."""
    return (up(x) @ weight.to(accumulator(x.dtype)).T).to(x.dtype)


@operator(
    "x[T,K]:act, weight[N,K]:act -> y[T,N]:f32",
    cost=_gemm("fp32"),
    judge=Judge("bound", "K"),
    samples=grid(_dense_inputs, [{"T": t, "N": 256, "K": 4096} for t in (0, 1, 16)] + [{"T": 5, "N": 24, "K": 96}]),
)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Linear in float32 on both operands widened, result kept in float32: router, compressor, head (spec §2.0)."""
    acc = torch.promote_types(accumulator(x.dtype), accumulator(weight.dtype))
    return x.to(acc) @ weight.to(acc).T


def _matmul_fp8_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    codes, scale = formats.quantize_fp8(draw.act("x", T, K), BLOCK, torch.float8_e4m3fn)
    return codes, scale, *fp8_weight(draw, "weight", N, K), draw.dtype


@operator(
    "x[T,K]:fp8, x_scale[T,ceil(K,128)]:scale, weight[N,K]:fp8, weight_scale[ceil(N,128),ceil(K,128)]:scale"
    " -> y[T,N]:dtype",
    cost=_gemm("fp8"),
    judge=Judge("bound", "K"),
    samples=grid(_matmul_fp8_inputs, _pairs()),
)
def matmul_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 x FP8 product with power-of-two block scales, float32 accumulation, one rounding to ``dtype``.

    Scales are powers of two, so multiplying them into the codes first is exact and equals the block-wise rule.

    Args:
        x, x_scale: codes FP8 [T, K]; UE8M0 (or float32) [T, K/128].
        weight, weight_scale: codes FP8 [N, K]; [ceil(N/128), ceil(K/128)].

    Source: spec §3.3.
    """
    acc = accumulator(dtype)
    a = formats.dequantize_fp8(x, x_scale, BLOCK).to(acc)
    return (a @ formats.dequantize_weight_fp8(weight, weight_scale).to(acc).T).to(dtype)


def _matmul_fp4_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    codes, scale = formats.quantize_fp8(draw.act("x", T, K), BLOCK, torch.float8_e4m3fn)
    return codes, scale, *fp4_weight(draw, "weight", N, K), draw.dtype


_EXPERT = [
    {"T": t, "N": n, "K": k, "full": max(t, 1) * n * k > 2**22}
    for t in (0, 1, 64)
    for n, k in ((4096, 4096), (4096, 2048), (512, 4096), (96, 128))
]


@operator(
    "x[T,K]:fp8, x_scale[T,ceil(K,128)]:scale, weight[N,K//2]:fp4, weight_scale[N,ceil(K,32)]:scale -> y[T,N]:dtype",
    cost=_gemm("fp8"),
    judge=Judge("bound", "K"),
    samples=grid(_matmul_fp4_inputs, _EXPERT),
)
def matmul_fp4(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 x FP4 product, weights scaled per row and 32 of K, float32 accumulation, one rounding (spec §3.3).

    Args:
        weight: packed E2M1 [N, K/2], even element in the low nibble.
    """
    acc = accumulator(dtype)
    a = formats.dequantize_fp8(x, x_scale, BLOCK).to(acc)
    return (a @ formats.dequantize_weight_fp4(weight, weight_scale).to(acc).T).to(dtype)


def _matmul_int8_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    weight, scale = formats.quantize_int8(draw.f32("weight", N, K) * K**-0.5)
    return *formats.quantize_int8(draw.act("x", T, K)), weight, scale[:, 0].contiguous(), draw.dtype


@operator(
    "x[T,K]:i8, x_scale[T,1]:f32, weight[N,K]:i8, weight_scale[N]:f32 -> y[T,N]:dtype",
    cost=_gemm("int8"),
    judge=Judge("bound", "1"),
    samples=grid(_matmul_int8_inputs, _EXPERT),
)
def matmul_int8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """INT8 x INT8 product, exact integer sums, scaled per token and per output channel, one rounding to ``dtype``."""
    total = (x.double() @ weight.double().T).to(accumulator(dtype))
    return (total * x_scale.to(total.dtype) * weight_scale.to(total.dtype)).to(dtype)


def _fp8_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    return draw.act("x", T, K), *fp8_weight(draw, "weight", N, K)


@operator(
    "x[T,K]:act, weight[N,K]:fp8, weight_scale[ceil(N,128),ceil(K,128)]:scale -> y[T,N]:x",
    level="fused",
    composite=True,
    cost=_gemm("fp8"),
    judge=Judge("bound", "K"),
    samples=grid(_fp8_inputs, _pairs()),
)
def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """FP8 linear: quantise activations per token and 128 of K in the weight's dialect, then multiply (spec §3.3)."""
    codes, scale = quant_act_fp8(x, BLOCK, weight.dtype)
    return matmul_fp8(codes, scale, weight, weight_scale, x.dtype)


def _fp4_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    return draw.act("x", T, K), *fp4_weight(draw, "weight", N, K)


@operator(
    "x[T,K]:act, weight[N,K//2]:fp4, weight_scale[N,ceil(K,32)]:scale -> y[T,N]:x",
    level="fused",
    composite=True,
    cost=_gemm("fp8"),
    judge=Judge("bound", "K"),
    samples=grid(_fp4_inputs, _EXPERT),
)
def linear_fp4(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """FP4-weight linear: activations to FP8 per token and 128 of K, then multiply (spec §3.3)."""
    codes, scale = quant_act_fp8(x, BLOCK, torch.float8_e4m3fn)
    return matmul_fp4(codes, scale, weight, weight_scale, x.dtype)


def _int8_inputs(draw: Draw, T: int, N: int, K: int) -> tuple[Any, ...]:
    weight, scale = formats.quantize_int8(draw.f32("weight", N, K) * K**-0.5)
    return draw.act("x", T, K), weight, scale[:, 0].contiguous()


@operator(
    "x[T,K]:act, weight[N,K]:i8, weight_scale[N]:f32 -> y[T,N]:x",
    level="fused",
    composite=True,
    cost=_gemm("int8"),
    judge=Judge("bound", "1"),
    samples=grid(_int8_inputs, _EXPERT),
)
def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """W8A8 linear: activations to INT8 per token, integer product, scales per token and output channel."""
    codes, scale = quant_act_int8(x)
    return matmul_int8(codes, scale, weight, weight_scale, x.dtype)


def _grouped_inputs(draw: Draw, T: int, G: int, N: int, K: int) -> tuple[Any, ...]:
    return draw.act("x", T, G, K), draw.weight("weight", G, N, K)


def _grouped_cost(c: Call) -> Cost:
    return Cost({"bf16": 2.0 * c.axes["T"] * c.axes["G"] * c.axes["N"] * c.axes["K"]})


@operator(
    "x[T,G,K]:act, weight[G,N,K]:act -> y[T,G,N]:x",
    cost=_grouped_cost,
    judge=Judge("bound", "K"),
    samples=grid(
        _grouped_inputs,
        [{"T": t, "G": g, "N": 1024, "K": 4096, "full": True} for t in (1, 64) for g in (8, 16)]
        + [{"T": t, "G": 2, "N": 48, "K": 128} for t in (0, 1, 5)],
    ),
)
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One dense linear per group of heads: x carrier [T, G, K], weight [G, N, K] -> carrier [T, G, N].

    Source: spec §2.5 step 9 (``wo_a``).
    """
    wide = torch.einsum("tgk,gnk->tgn", up(x), weight.to(accumulator(x.dtype)))
    return wide.to(x.dtype)


def _head_inputs(draw: Draw, T: int, V: int, D: int) -> tuple[Any, ...]:
    return draw.act("x", T, D), draw.weight("weight", V, D)


@operator(
    "x[T,D]:act, weight[V,D]:act -> logits[T,V]:f32",
    level="fused",
    composite=True,
    cost=lambda c: Cost({"fp32": 2.0 * c.axes["T"] * c.axes["V"] * c.axes["D"]}),
    judge=Judge("bound", "D"),
    samples=grid(
        _head_inputs,
        [{"T": 1, "V": 129280, "D": 4096, "full": True}, *({"T": t, "V": 512, "D": 256} for t in (0, 1, 5))],
    ),
)
def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """Vocabulary logits float32 [T, V] of normed hidden rows x [T, D]; float32 product (spec §2.9)."""
    return linear_fp32(x, weight)


def _embed_inputs(draw: Draw, T: int, V: int, D: int) -> tuple[Any, ...]:
    return draw.ints("ids", T, high=V), draw.act("table", V, D)


@operator(
    "ids[T]:int, table[V,D]:act -> x[T,D]:table",
    cost=lambda c: Cost(bytes=2.0 * c.axes["T"] * c.axes["D"] * c.tensors["table"].dtype.itemsize),
    judge=Judge("exact"),
    samples=grid(_embed_inputs, [{"T": t, "V": 512, "D": 256} for t in (0, 1, 64)], families=("normal",)),
)
def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Gather embedding rows: ids integer [T] in [0, V), table [V, D] -> [T, D] (spec §2.1)."""
    return table[ids]
