"""One decision: which kernel of a backend serves one call, and every reason why others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hal.contract import Call, dtype_name
from hal.errors import ContractError, NoKernelError
from hal.kernel import Kernel, Reason
from hal.operator import OPERATORS

Via = Literal["kernel", "parts", "reference"]


class _Counter:
    """Registry look-ups made in this process; a step under a plan adds none."""

    count = 0


def lookups() -> int:
    """Registry look-ups so far: every decision is one."""
    return _Counter.count


@dataclass(frozen=True)
class Refusal:
    """A kernel that was considered and why it does not serve the call."""

    kernel: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Decision:
    """Who serves one operator at one call: a kernel, its parts (the next level down), or the reference."""

    operator: str
    via: Via
    kernel: Kernel | None
    refused: tuple[Refusal, ...]
    call: Call

    @property
    def chosen(self) -> str:
        """Kernel name, ``parts`` or ``reference``."""
        return self.kernel.name if self.kernel else self.via

    def why(self) -> str:
        """One line of reasons: what refused, or that nothing is registered."""
        if not self.refused:
            return "chosen" if self.kernel else "no kernel registered"
        return "; ".join(f"{r.kernel}: {', '.join(map(str, r.reasons))}" for r in self.refused)

    def as_dict(self) -> dict[str, Any]:
        """The decision as JSON-ready data."""
        cost = OPERATORS[self.operator].cost(self.call)
        return {
            "operator": self.operator,
            "via": self.via,
            "chosen": self.chosen,
            "axes": dict(self.call.axes),
            "dtypes": {k: dtype_name(m.dtype) for k, m in self.call.tensors.items()},
            "evidence": self.kernel.evidence if self.kernel else "reference",
            "reproducibility": self.kernel.reproducibility if self.kernel else None,
            "params": dict(self.kernel.params) if self.kernel else {},
            "source_hash": self.kernel.source_hash if self.kernel else None,
            "refused": [{"kernel": r.kernel, "reasons": [str(x) for x in r.reasons]} for r in self.refused],
            "cost": {"flops": dict(cost.flops), "bytes": cost.bytes},
        }


@dataclass(frozen=True)
class Policy:
    """What dispatch may do: the kernels at hand, the architecture, and which choices a plan file pins."""

    kernels: Mapping[str, tuple[Kernel, ...]]
    arch: str
    banned: frozenset[tuple[str, str]] = frozenset()
    pinned: Mapping[str, Sequence[str]] = field(default_factory=dict)


def decide(call: Call, policy: Policy) -> Decision:
    """Choose for ``call``: the kernel of highest priority without reasons, else parts, else the reference.

    Raises:
        ContractError: two kernels tie; the message names both.
        NoKernelError: a pinned plan names kernels for this operator and none of them serves the call.
    """
    _Counter.count += 1
    op = OPERATORS[call.operator]
    refused, able = [], []
    for k in policy.kernels.get(op.name, ()):
        reasons = k.reasons(call, policy.arch)
        if (op.name, k.name) in policy.banned:
            reasons.append(Reason("bucket-edge", "refuses the other end of the bucket"))
        if op.name in policy.pinned and k.name not in policy.pinned[op.name]:
            reasons.append(Reason("pinned", "the plan file names another"))
        if reasons:
            refused.append(Refusal(k.name, tuple(reasons)))
        else:
            able.append(k)
    best = _best(op.name, able)
    via: Via = "kernel" if best else ("parts" if op.composite else "reference")
    decision = Decision(op.name, via, best, tuple(refused), call)
    allowed = policy.pinned.get(op.name)
    if allowed is not None and decision.chosen not in allowed:
        raise NoKernelError(f"plan file: {op.name} is pinned to {', '.join(allowed)}, but {decision.why()}")
    return decision


def _best(operator: str, able: Sequence[Kernel]) -> Kernel | None:
    if not able:
        return None
    ranked = sorted(able, key=lambda k: -k.priority)
    if len(ranked) > 1 and ranked[0].priority == ranked[1].priority:
        raise ContractError(
            f"operator {operator}: kernels {ranked[0].name} and {ranked[1].name} tie at priority {ranked[0].priority}; "
            "give one of them a higher priority"
        )
    return ranked[0]
