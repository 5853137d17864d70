"""Verdicts: does a kernel compute its operator, on one sample, within limits that :mod:`hal_conformance.numerics` derives?

Four kinds. ``exact``: same bits. ``bound``: every element within its limit. ``topk``: the chosen set is right up to the
error of the scores themselves. ``distribution``: noise is counter-based, so the same token. Whatever the kind: outputs
have the reference's shapes and dtypes, NaN and infinities lie where the reference has them, arguments that the operator
does not write keep their bits, and integer outputs are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hal.contract import Call, dtype_name, flatten
from hal.errors import ContractError
from hal.kernel import Kernel
from hal.operator import OPERATORS, Operator, Sample, references
from hal.receipt import Receipt, watermarked
from hal_conformance import numerics
from hal_conformance.numerics import FP32, Accumulator, lift

Op = Operator[..., Any]
Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """Outcome of one kernel on one sample.

    ``error`` and ``limit`` are those of the element nearest to (or furthest beyond) its limit, at ``where``; ``why`` is the
    derivation or, on failure, what is wrong.
    """

    ok: bool
    error: float
    limit: float
    where: str
    why: str
    operator: str
    kernel: str
    sample: str


@dataclass(frozen=True)
class _Finding:
    ok: bool
    error: float
    limit: float
    where: str
    why: str


def compare(op: Op, kernel: Kernel, sample: Sample, accumulator: Accumulator = FP32) -> Verdict:
    """Judge ``kernel`` on ``sample`` of ``op``; ``accumulator`` is what its sums are declared to be kept in.

    The kernel runs once on arguments of its own; calling an operator, whose work it claims, is a fault.
    """
    return _compare(op, kernel, sample.id, sample.make(), accumulator)


def _compare(op: Op, kernel: Kernel, sample: str, given: tuple[Any, ...], accumulator: Accumulator) -> Verdict:
    found = _judge(op, kernel, given, accumulator)
    return Verdict(found.ok, found.error, found.limit, found.where, found.why, op.name, kernel.name, sample)


def run(
    backend_kernels: Mapping[str, Sequence[Kernel]],
    ops: Collection[str] | None = None,
    full: bool = False,
    *,
    arch: str = "",
) -> list[Verdict]:
    """Judge every kernel on every sample inside its claim on ``arch``; ``full`` includes the long samples."""
    out = []
    for name, kernels in backend_kernels.items():
        op = OPERATORS[name]
        for sample in op.samples() if ops is None or name in ops else ():
            if sample.full and not full:
                continue
            drawn = sample.make()
            call = op.contract.call(drawn, {})
            out += [_compare(op, k, sample.id, drawn, FP32) for k in kernels if not k.reasons(call, arch)]
    return out


def _judge(op: Op, kernel: Kernel, given: tuple[Any, ...], accumulator: Accumulator) -> _Finding:
    declared = _outputs(op, op.fn, numerics.copies(given))
    mine = numerics.copies(given)
    receipt = Receipt(op.name, op.level, "kernel", kernel.name, "judged")
    try:
        seen = _outputs(op, watermarked(kernel.fn, receipt), mine)
    except ContractError as e:
        return _Finding(False, float("inf"), 0.0, "", str(e))
    fault = _structure(seen, declared) or _touched(op, given, mine)
    if fault:
        return _Finding(False, float("inf"), 0.0, "", fault)
    call = op.contract.call(given, {})
    if op.judge.kind in ("exact", "distribution"):
        findings = [_same(name, seen[name], declared[name]) for name in declared]
    elif op.judge.kind == "topk":
        findings = _topk(op, given, seen)
    else:
        findings = _bounded(op, given, call, seen, declared, accumulator)
    return max(findings, key=_severity, default=_Finding(True, 0.0, 0.0, "", "the operator has no output here"))


def _severity(f: _Finding) -> tuple[bool, float]:
    return not f.ok, f.error / f.limit if f.limit else f.error


def _outputs(op: Op, fn: Any, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """What ``fn`` returns and writes, by the contract's names."""
    with references(), torch.inference_mode():
        returned = fn(*args)
    values = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    names = [p.name for p in op.contract.outputs] or ["output"]
    out = {names[i] if i < len(names) else f"output {i}": v for i, v in enumerate(values)}
    named = dict(zip(op.contract.signature.parameters, args, strict=False))
    return out | {f"{w} (written)": named[w] for w in op.writes}


def _structure(seen: Named, right: Named) -> str:
    if list(seen) != list(right):
        return f"outputs are {', '.join(seen) or 'none'}, right are {', '.join(right) or 'none'}"
    for name, r in right.items():
        y = seen[name]
        if not isinstance(y, Tensor) or (y.shape, y.dtype) != (r.shape, r.dtype):
            what = f"{dtype_name(y.dtype)} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            return f"{name} is {what}, right is {dtype_name(r.dtype)} {list(r.shape)}"
    return ""


def _touched(op: Op, given: tuple[Any, ...], used: tuple[Any, ...]) -> str:
    """The first argument that the kernel changed without being allowed to."""
    for name, before, after in zip(op.contract.signature.parameters, given, used, strict=False):
        leaves = zip(_leaves(name, before).items(), _leaves(name, after).values(), strict=True)
        for (leaf, b), a in leaves:
            if name not in op.writes and not _bits_equal(b, a).all():
                return f"argument {leaf} was changed; {op.name} writes {', '.join(op.writes) or 'nothing'}"
    return ""


def _leaves(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    names = [k for k in flatten(name, value) if k != name]
    found = {k: getattr(value, k.split(".", 1)[1]) for k in names}
    return {k: v for k, v in found.items() if isinstance(v, Tensor)}


def _bits(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().flatten().view(kinds[t.dtype.itemsize]) if t.numel() else t.new_empty(0, dtype=torch.uint8)


def _bits_equal(a: Tensor, b: Tensor) -> Tensor:
    return _bits(a) == _bits(b)


def _place(name: str, flat: int, shape: Sequence[int]) -> str:
    index: list[str] = []
    for size in reversed(shape):
        index.append(str(flat % size))
        flat //= size
    return f"{name}[{', '.join(reversed(index))}]"


def _same(name: str, y: Tensor, right: Tensor) -> _Finding:
    differ = ~_bits_equal(y, right)
    if not bool(differ.any()):
        return _Finding(True, 0.0, 0.0, "", f"{name}: same bits")
    at = int(differ.nonzero()[0, 0])
    a, b = (t.contiguous().flatten()[at].float().item() for t in (y, right))
    why = f"{int(differ.sum())} of {differ.numel()} elements of {name} differ; the first is {a!r}, right is {b!r}"
    return _Finding(False, abs(a - b), 0.0, _place(name, at, y.shape), why)


def _bounded(
    op: Op, given: tuple[Any, ...], call: Call, seen: Named, declared: Named, accumulator: Accumulator
) -> list[_Finding]:
    exact = _outputs(op, op.fn, tuple(lift(a, torch.float64) for a in given))
    wide = _outputs(op, op.fn, tuple(lift(a, torch.float32) for a in given))
    h = numerics.reduction(op.judge.reduction, call)
    out = []
    for name, y in seen.items():
        if not y.dtype.is_floating_point or y.dtype.itemsize == 1:
            out.append(_same(name, y, declared[name]))
            continue
        out.append(_within(name, y, exact[name], wide[name], declared[name], accumulator, h))
    return out


def _within(
    name: str, y: Tensor, exact: Tensor, wide: Tensor, declared: Tensor, accumulator: Accumulator, h: int
) -> _Finding:
    """One floating-point output against its limits, after its NaN and infinities."""
    finite = declared.isfinite()
    special = _same(name, torch.where(finite, 0, y.double()).nan_to_num(nan=7.0), _special(declared, finite))
    if not special.ok or not bool(y[finite].isfinite().all()):
        return _Finding(False, float("inf"), 0.0, special.where or name, f"NaN or infinity of {name} lie elsewhere")
    if not y.numel():
        return _Finding(True, 0.0, 0.0, "", f"{name}: empty")
    keep = [t.double().masked_fill(~finite, 0.0) for t in (exact, wide)]
    limit = numerics.limits(keep[0], keep[1], declared.masked_fill(~finite, 0.0), accumulator, h)
    error = (y.double().masked_fill(~finite, 0.0) - keep[0]).abs()
    ratio = torch.where(error > 0, error / limit, 0.0).flatten()
    at = int(ratio.argmax())
    e, bound, beyond = float(error.flatten()[at]), float(limit.flatten()[at]), int((error > limit).sum())
    why = (
        f"{name}: {beyond} of {ratio.numel()} elements beyond ½ulp({dtype_name(y.dtype)}) + sums of {h} at "
        f"2^{torch.tensor(accumulator.roundoff).log2().item():g} + inner roundings; error {e:.3g}, limit {bound:.3g}"
    )
    return _Finding(beyond == 0, e, bound, _place(name, at, y.shape), why)


def _special(right: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, 0, right.double()).nan_to_num(nan=7.0)


def _topk(op: Op, given: tuple[Any, ...], seen: Named) -> list[_Finding]:
    """The ids as a set (and the order that the operator states); float outputs belong to the kernel's own ids."""
    arguments = dict(zip(op.contract.signature.parameters, given, strict=False))
    scores_of = numerics.SCORES[op.name]
    exact, rounded = scores_of(arguments, True), scores_of(arguments, False)
    name, ids = next((n, t) for n, t in seen.items() if not t.dtype.is_floating_point)
    findings = [_row_of_ids(name, t, ids[t], exact[t], rounded[t]) for t in range(ids.shape[0])]
    if op.name == "gate_topk" and all(f.ok for f in findings):
        findings.append(_gate_weights(arguments, ids, seen["weights"]))
    return findings


def _row_of_ids(name: str, t: int, ids: Tensor, exact: Tensor, rounded: Tensor) -> _Finding:
    """One row: as many distinct real ids as there are, none worse than the k-th best by more than the scores' error."""
    where, real = f"{name}[{t}]", exact > -torch.inf
    count = min(ids.shape[0], int(real.sum()))
    chosen = ids[ids >= 0].long()
    held = len(set(chosen.tolist())) == chosen.numel() == count
    if not held or bool((chosen >= exact.shape[0]).any()) or bool((ids[:count] < 0).any()):
        return _Finding(
            False, float("inf"), 0.0, where, f"{where} is {ids.tolist()[:8]}…, right is {count} distinct ids"
        )
    if count == 0:
        return _Finding(True, 0.0, 0.0, where, f"{where}: nothing to choose")
    if not bool(real[chosen].all()):
        return _Finding(False, float("inf"), 0.0, where, f"{where} holds a hidden entry")
    # two scores may each be off by the error, hence twice; never less than float32's own rounding
    error = (rounded - exact)[real].abs().max()
    margin = float(2 * torch.maximum(error, exact[real].abs().max() * 2.0**-22))
    least = float(exact.topk(count).values[-1])
    loss = least - float(exact[chosen].min())
    order = _order_fault(name, chosen, exact, margin)
    return _Finding(
        loss <= margin and not order, loss, margin, where, order or f"{where}: worst chosen score misses by {loss:.3g}"
    )


def _order_fault(name: str, chosen: Tensor, exact: Tensor, margin: float) -> str:
    """``entries`` ascend; ``ids`` fall by score."""
    if name == "entries":
        return "" if bool((chosen.diff() > 0).all()) else "entries do not ascend"
    return "" if bool((exact[chosen].diff() <= margin).all()) else "ids do not fall by score"


def _gate_weights(arguments: Mapping[str, Any], ids: Tensor, weights: Tensor) -> _Finding:
    def routed(dtype: torch.dtype) -> Tensor:
        scores = softplus(arguments["logits"].to(dtype).gather(1, ids), threshold=20.0).sqrt()
        share: Tensor = scores / scores.sum(-1, keepdim=True) * arguments["scale"]
        return share

    exact, wide = routed(torch.float64), routed(torch.float32)
    return _within("weights", weights, exact, wide, wide, FP32, ids.shape[1])
