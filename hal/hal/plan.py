"""From choice to plan: resolve every operator of a model once per bucket, then call kernels directly.

``bind`` runs the model's own step on meta tensors at both edges of every bucket. Each operator call met on the way is
decided once; a composite that nobody claims is entered, so its parts are decided in turn: that is the lattice. What
comes out is, per bucket, a list of routes (one callable per operator) that a step activates with one assignment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hal.contract import Call
from hal.dispatch import Decision, Policy, decide, lookups
from hal.errors import ContractError, NoKernelError, UsageError
from hal.kernel import Kernel
from hal.operator import OPERATORS, Operator, Route, routes
from hal.receipt import Receipts, counted, watermarked

log = logging.getLogger("hal")
PLAN_VERSION = 1


@dataclass(frozen=True, order=True)
class Bucket:
    """Steps that share their choices: ``low`` to ``high`` tokens of one phase (``decode`` or ``prefill``)."""

    phase: str
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.phase}:{self.low}-{self.high}"


class Bindable(Protocol):
    """What ``bind`` needs of a model."""

    def buckets(self) -> Sequence[Bucket]:
        """Every bucket that a step may have."""

    def trace(self, bucket: Bucket, tokens: int) -> None:
        """Run one step of ``tokens`` tokens on meta tensors through the operators."""


Key = tuple[Any, ...]


@dataclass
class _Tracer:
    """Decides each operator call that a traced step makes, and remembers the calls by key."""

    policy: Policy
    decisions: dict[tuple[str, Key], Decision] = field(default_factory=dict)
    banned: set[tuple[str, str]] = field(default_factory=set)

    def table(self) -> list[Route]:
        return [self._route(op) for op in OPERATORS.values()]

    def _route(self, op: Operator[..., Any]) -> Route:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen = op.contract.call(args, kwargs)
            decision = self._decide(op, seen, key_of(op, args))
            if decision.via == "parts":
                return op.fn(*args, **kwargs)
            return op.fake_outputs(seen, torch.device("meta"))

        return call

    def _decide(self, op: Operator[..., Any], seen: Call, key: Key) -> Decision:
        known = self.decisions.get((op.name, key))
        if known is None:
            known = self.decisions[op.name, key] = decide(seen, self.policy)
        elif known.kernel and known.kernel.reasons(seen, self.policy.arch):
            self.banned.add((op.name, known.kernel.name))
        return known


def key_of(op: Operator[..., Any], args: Sequence[Any]) -> Key:
    """What distinguishes specialisations of ``op`` at run time: constant axes and dtypes of its positional tensors."""
    return tuple(_part(op, name, value) for name, value in zip(op.contract.signature.parameters, args, strict=False))


def _part(op: Operator[..., Any], name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape[i] for i in _constant(op, name) if -value.ndim <= i < value.ndim))
    data = getattr(value, "data", None)
    if isinstance(data, torch.Tensor):
        return (getattr(value, "format", None), data.dtype, tuple(data.shape))
    return value if isinstance(value, str | torch.dtype) else None


_CONSTANT: dict[tuple[str, str], tuple[int, ...]] = {}


def _constant(op: Operator[..., Any], name: str) -> tuple[int, ...]:
    """Indices of an argument's constant axes, counted from the end where leading axes fold."""
    found = _CONSTANT.get((op.name, name))
    if found is None:
        pattern = next((p for p in op.contract.inputs if p.name == name), None)
        dims = pattern.dims if pattern else ()
        variable = set(op.variable)
        found = tuple(i - len(dims) for i, d in enumerate(dims) if not d.leading and d.text not in variable)
        _CONSTANT[op.name, name] = found
    return found


@dataclass
class Plan:
    """Every decision of a model on a backend, and the routes that carry them out."""

    backend: str
    arch: str
    ledger: Mapping[Bucket, Mapping[tuple[str, Key], Decision]]
    receipts: Receipts = field(default_factory=Receipts)
    watermark: bool = False
    _tables: dict[Bucket, list[Route]] = field(default_factory=dict)
    _bound_at: int = field(default_factory=lookups)

    def __post_init__(self) -> None:
        for bucket, decisions in self.ledger.items():
            self._tables[bucket] = self._build(decisions)

    @property
    def lookups(self) -> int:
        """Registry look-ups in this process since the plan was bound; steps add none."""
        return lookups() - self._bound_at

    def bucket(self, phase: str, tokens: int) -> Bucket:
        """The bucket of a step.

        Raises:
            UsageError: no bucket of the plan holds that many tokens.
        """
        for b in self._tables:
            if b.phase == phase and b.low <= tokens <= b.high:
                return b
        raise UsageError(f"{phase} step of {tokens} tokens: the plan's buckets are {', '.join(map(str, self._tables))}")

    @contextlib.contextmanager
    def active(self, bucket: Bucket) -> Iterator[None]:
        """Serve operators by this plan's choices for ``bucket``."""
        with routes(self._tables[bucket]):
            yield

    def fallbacks(self) -> dict[str, Decision]:
        """Operators that run their reference, each with one decision that says why."""
        flat = (d for decisions in self.ledger.values() for d in decisions.values())
        return {d.operator: d for d in flat if d.via == "reference"}

    def _build(self, decisions: Mapping[tuple[str, Key], Decision]) -> list[Route]:
        by_op: dict[str, dict[Key, Decision]] = {}
        for (name, key), decision in decisions.items():
            by_op.setdefault(name, {})[key] = decision
        return [self._op_route(op, by_op.get(op.name, {})) for op in OPERATORS.values()]

    def _op_route(self, op: Operator[..., Any], choices: Mapping[Key, Decision]) -> Route:
        chosen = {d.chosen: d for d in choices.values()}
        if len(chosen) == 1 and not self.watermark:  # test mode also refuses specialisations that bind did not trace
            return self._serve(op, next(iter(chosen.values())))
        if not chosen:
            return self._missing(op)
        table = {key: self._serve(op, d) for key, d in choices.items()}
        missing = self._missing(op)

        def switch(*args: Any, **kwargs: Any) -> Any:
            return table.get(key_of(op, args), missing)(*args, **kwargs)

        return switch

    def _serve(self, op: Operator[..., Any], decision: Decision) -> Route:
        receipt = self.receipts.of(decision)
        if decision.kernel is None:
            return counted(op.fn, receipt)
        return (watermarked if self.watermark else counted)(decision.kernel.fn, receipt)

    def _missing(self, op: Operator[..., Any]) -> Route:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            seen = op.contract.call(args, kwargs)
            raise ContractError(f"operator {op.name} was not in the plan at {seen.describe()}; bind did not trace it")

        return refuse


def bind(
    model: Bindable,
    backend: str,
    kernels: Mapping[str, tuple[Kernel, ...]],
    arch: str,
    *,
    strict: bool = False,
    fallback_budget: int | None = None,
    pinned: Mapping[str, Any] | None = None,
    watermark: bool = False,
) -> Plan:
    """Resolve every operator of ``model`` at every bucket.

    Args:
        kernels: the backend's kernels by operator name.
        arch: architecture that the backend probed.
        strict: forbid references (``--strict``).
        fallback_budget: most operators that may run their reference (``--fallback-budget``); None for no bound.
        pinned: a saved plan that must be served exactly (``--plan``).
        watermark: test mode, see :func:`hal.receipt.watermarked`.

    Raises:
        NoKernelError: ``strict`` or the budget is broken, or the pinned plan cannot be served; every operator is named.
    """
    ledger = {b: _resolve(model, b, Policy(kernels, arch, pinned=_pins(pinned, b))) for b in model.buckets()}
    plan = Plan(backend, arch, ledger, watermark=watermark)
    if pinned is not None:
        _check_pinned(plan, pinned)
    _check_fallbacks(plan, 0 if strict else fallback_budget, "--strict" if strict else "--fallback-budget")
    return plan


def _resolve(model: Bindable, bucket: Bucket, policy: Policy) -> Mapping[tuple[str, Key], Decision]:
    """Trace both edges until one choice per key serves the whole bucket."""
    while True:
        tracer = _Tracer(policy)
        with routes(tracer.table()):
            for tokens in sorted({bucket.high, bucket.low}, reverse=True):
                model.trace(bucket, tokens)
        if not tracer.banned:
            return tracer.decisions
        policy = replace(policy, banned=policy.banned | tracer.banned)


def _check_fallbacks(plan: Plan, budget: int | None, flag: str) -> None:
    missing = plan.fallbacks()
    if budget is not None and len(missing) > budget:
        lines = "; ".join(f"{name} ({d.why()})" for name, d in sorted(missing.items()))
        raise NoKernelError(
            f"{flag}: {len(missing)} operators have no kernel on {plan.backend}, allowed {budget}: {lines}"
        )
    if missing:
        names = ", ".join(sorted(missing))
        log.warning("%s: the reference serves %d operators: %s (see hal explain)", plan.backend, len(missing), names)


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as canonical data with a digest over everything else in it."""
    body: dict[str, Any] = {
        "version": PLAN_VERSION,
        "backend": plan.backend,
        "arch": plan.arch,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "buckets": {
            str(bucket): sorted((_entry(d, key) for (_, key), d in decisions.items()), key=lambda e: json.dumps(e))
            for bucket, decisions in plan.ledger.items()
        },
    }
    return body | {"digest": digest(body)}


def _entry(decision: Decision, key: Key) -> dict[str, Any]:
    full = decision.as_dict()
    return {k: full[k] for k in ("operator", "via", "chosen", "params", "source_hash", "evidence")} | {"key": repr(key)}


def digest(body: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of ``body`` without its digest."""
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def save(plan: Plan, path: Path) -> str:
    """Write ``plan`` to ``path`` (whole or not at all); returns its digest."""
    body = to_dict(plan)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    return str(body["digest"])


def load(path: Path) -> dict[str, Any]:
    """Read a plan file.

    Raises:
        UsageError: the file is missing, not JSON, of another version, or its digest does not match.
    """
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise UsageError(f"plan file {path}: {e}; write one with hal plan --save") from e
    if not isinstance(body, dict) or body.get("version") != PLAN_VERSION:
        seen = body.get("version") if isinstance(body, dict) else type(body).__name__
        raise UsageError(f"plan file {path}: plan version {seen!r}, right is {PLAN_VERSION}")
    if body.get("digest") != digest(body):
        raise UsageError(f"plan file {path}: digest {body.get('digest')} is not that of the content ({digest(body)})")
    return body


def _pins(pinned: Mapping[str, Any] | None, bucket: Bucket) -> Mapping[str, Sequence[str]]:
    pins: dict[str, list[str]] = {}
    for entry in (pinned or {}).get("buckets", {}).get(str(bucket), ()):
        pins.setdefault(entry["operator"], []).append(entry["chosen"])
    return pins


def _check_pinned(plan: Plan, pinned: Mapping[str, Any]) -> None:
    lines = diff(pinned, to_dict(plan))
    if lines:
        raise NoKernelError(f"--plan: the saved plan cannot be served here: {'; '.join(lines[:8])}")


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences of two plan files, one line each; empty when both serve the same kernels."""
    lines = [f"{k}: {old[k]} -> {new[k]}" for k in ("backend", "arch") if old[k] != new[k]]
    for bucket in sorted(set(old["buckets"]) | set(new["buckets"])):
        before, after = _by_key(old, bucket), _by_key(new, bucket)
        for at in sorted(set(before) | set(after)):
            if before.get(at) != after.get(at):
                lines.append(f"{bucket} {at[0]}: {_short(before.get(at))} -> {_short(after.get(at))}")
    return lines


def _by_key(plan: Mapping[str, Any], bucket: str) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(e["operator"], e["key"]): e for e in plan["buckets"].get(bucket, ())}


def _short(entry: Mapping[str, Any] | None) -> str:
    return f"{entry['chosen']}@{entry['source_hash'] or '-'}" if entry else "absent"
