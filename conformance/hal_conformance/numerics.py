"""The limits by which outputs are judged: each derived from formats, reduction length and operands, none typed in.

An element y of a bounded output passes when

    |y − R64|  ≤  ½ulp(R64)  +  A  +  2·max over the row of X

* ``R64``: the reference on float64 carriers, on the same codes and scales that the kernel gets.
* ``½ulp``: the one rounding to the output's dtype, at the element's own exponent. Truncation is off by up to twice this.
* ``A = 8·max(rms(Rw − R64), u·√h·rms(R64))`` over the row (last axis). ``Rw`` is the reference on float32 carriers, where
  every rounding to the carrier is the identity: its error is what float32 sums of *these* operands cost, so it grows with
  cancellation as Σ|a·b| does. ``u`` and ``h`` are the accumulator's unit roundoff and chain of additions; their product
  is the least that the typical error may be taken for, so that a lucky ``Rw`` does not fail another order of summing.
  8 is five deviations (one false alarm in 10^6 elements) times 1.6 for sums in the worse of two legal orders.
* ``X = max(0, |Rq − R64| − ½ulp − A)``: what the reference at the declared precision loses at its *inner* rounding points
  and cannot blame on the last rounding; zero for operators that round once. A kernel may lose twice its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hal.contract import CARRIERS, Call
from hal.errors import ContractError

SAFETY = 8.0
INNER = 2.0


@dataclass(frozen=True)
class Accumulator:
    """What sums are kept in: unit ``roundoff`` and ``chain``, the additions at that precision (None: the reduction)."""

    roundoff: float
    chain: int | None = None


FP32 = Accumulator(2.0**-24)
#: FP8 matrix units that keep 14 bits and promote to float32 every 128 of K, in steps of 32
PROMOTED_14_BITS = Accumulator(2.0**-13, 4)


def lift(value: Any, dtype: torch.dtype) -> Any:
    """An argument with every carrier widened to ``dtype``: tensors, tensors in dataclasses, and a dtype argument.

    Codes and UE8M0 scales stay what they are; nothing is narrowed.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CARRIERS and value.dtype.itemsize < dtype.itemsize else value.clone()
    if isinstance(value, torch.dtype) and value in CARRIERS:
        return dtype if value.itemsize < dtype.itemsize else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: lift(getattr(value, f.name), dtype) for f in fields(value)})
    return value


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors of their own, values unchanged."""
    return tuple(lift(a, torch.float16) if not isinstance(a, torch.dtype) else a for a in args)


def reduction(text: str, call: Call) -> int:
    """The value of a judge's reduction (``"K"``, ``"lanes*r"``) at ``call``.

    Raises:
        ContractError: the text names what the call does not have.
    """
    scope: dict[str, Any] = {k: v for k, v in call.scalars.items() if isinstance(v, int)} | dict(call.axes)
    try:
        value = eval(text, {"__builtins__": {}, "max": max, "min": min}, scope)
    except NameError as e:
        raise ContractError(
            f"operator {call.operator}: judge's reduction {text!r}: {e}; known are {sorted(scope)}"
        ) from e
    return max(1, int(value))


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of ``dtype`` at x float64; the spacing of its subnormals below the least normal."""
    info = torch.finfo(dtype)
    least = math.frexp(info.tiny)[1]
    exponent = torch.frexp(x).exponent.clamp(min=least).masked_fill(x == 0, least)  # |x| < 2^exponent
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)


def _row_rms(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt() if x.dim() else x.abs()


def _row_max(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True) if x.dim() and x.numel() else x


def limits(exact: Tensor, wide: Tensor, declared: Tensor, accumulator: Accumulator, h: int) -> Tensor:
    """The limit of every element, float64; see the module's docstring.

    Args:
        exact: R64; ``wide``: Rw; ``declared``: Rq, whose dtype is the output's.
        h: additions of the longest sum.
    """
    rounding = half_ulp(exact, declared.dtype)
    chain = min(h, accumulator.chain or h)
    least = accumulator.roundoff * math.sqrt(chain) * _row_rms(exact)
    sums = SAFETY * torch.maximum(_row_rms(wide.double() - exact), least)
    inner = ((declared.double() - exact).abs() - rounding - sums).clamp(min=0)
    return rounding + sums + INNER * _row_max(inner)


def index_scores(arguments: Mapping[str, Any], exact: bool) -> Tensor:
    """Scores [T, n] of ``index_topk``, n the longest sequence, −inf where hidden or NaN, in float64 or as declared."""
    visible, slots = arguments["visible"].tolist(), arguments["slots"].tolist()
    out = torch.full((len(visible), max(visible, default=0)), -torch.inf, dtype=torch.float64)
    for t, (n, slot) in enumerate(zip(visible, slots, strict=True)):
        j = torch.arange(n)
        page = arguments["page"]
        held = arguments["keys"][arguments["pages"][slot, j // page].long() * page + j % page]
        scores = _index_row(arguments["q"][t], arguments["weights"][t, :, None], held, exact)
        out[t, :n] = scores.masked_fill(scores.isnan(), -torch.inf)
    return out


def _index_row(q: Tensor, weights: Tensor, keys: Tensor, exact: bool) -> Tensor:
    if exact:
        return ((q.double() @ keys.double().T).relu() * weights.double()).sum(0)
    dots = (q.float() @ keys.float().T).to(q.dtype)
    return (dots.relu() * weights).float().sum(0).to(q.dtype).double()


def gate_scores(arguments: Mapping[str, Any], exact: bool) -> Tensor:
    """Biased scores [T, E] of ``gate_topk``, in float64 or as declared."""
    dtype = torch.float64 if exact else torch.float32
    z: Tensor = arguments["logits"].to(dtype)
    biased: Tensor = softplus(z, threshold=20.0).sqrt() + arguments["bias"].to(dtype)
    return biased.double()


#: scores behind each operator that is judged as a set
SCORES = {"index_topk": index_scores, "gate_topk": gate_scores}
