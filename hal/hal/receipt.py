"""Execution receipts: which kernel served which operator, how often, and proof that it really ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from hal.dispatch import Decision
from hal.errors import ContractError
from hal.operator import OPERATORS, Route, routes


@dataclass
class Receipt:
    """Calls of one operator served by one implementation."""

    operator: str
    level: str
    via: str
    chosen: str
    why: str
    calls: int = 0


@dataclass
class Receipts:
    """All receipts of a plan, by (operator, implementation)."""

    entries: dict[tuple[str, str], Receipt] = field(default_factory=dict)

    def of(self, decision: Decision) -> Receipt:
        """The receipt that counts calls of ``decision``; made on first use."""
        key = (decision.operator, decision.chosen)
        if key not in self.entries:
            level = OPERATORS[decision.operator].level
            self.entries[key] = Receipt(decision.operator, level, decision.via, decision.chosen, decision.why())
        return self.entries[key]

    def rows(self) -> list[Receipt]:
        """Receipts with calls, operators in declaration order."""
        order = list(OPERATORS)
        used = (r for r in self.entries.values() if r.calls)
        return sorted(used, key=lambda r: (order.index(r.operator), r.chosen))

    def fallback_calls(self) -> int:
        """Calls that ran a reference because no kernel serves them."""
        return sum(r.calls for r in self.entries.values() if r.via == "reference")

    def reset(self) -> None:
        """Set every count to zero."""
        for r in self.entries.values():
            r.calls = 0


def counted(fn: Callable[..., Any], receipt: Receipt) -> Route:
    """``fn`` with its calls counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        receipt.calls += 1
        return fn(*args, **kwargs)

    return call


def watermarked(fn: Callable[..., Any], receipt: Receipt) -> Route:
    """``fn`` in test mode: it may call no other operator, and its outputs carry the kernel's name (``hal_kernel``).

    Raises (when called):
        ContractError: a kernel delegates to an operator, so that its claim is another's work, or returns an argument
            or a view of one as if it were its output.
    """
    forbidden = [_forbid(receipt, name) for name in OPERATORS]

    def call(*args: Any, **kwargs: Any) -> Any:
        receipt.calls += 1
        with routes(forbidden):
            out = fn(*args, **kwargs)
        held = {t.untyped_storage().data_ptr() for t in _held((args, tuple(kwargs.values())))} - {0}
        for t in _tensors(out):
            if t.untyped_storage().data_ptr() in held:
                raise ContractError(f"kernel {receipt.chosen} of {receipt.operator} returns an argument as its output")
            t.hal_kernel = receipt.chosen  # type: ignore[attr-defined]
        return out

    return call


def _forbid(receipt: Receipt, name: str) -> Route:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ContractError(f"kernel {receipt.chosen} of {receipt.operator} calls operator {name}; it claims that work")

    return refuse


def _held(value: Any) -> list[torch.Tensor]:
    """Every tensor inside arguments: tuples and dataclasses are looked into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for v in value for t in _held(v)]
    if is_dataclass(value) and not isinstance(value, type):
        return [t for f in fields(value) for t in _held(getattr(value, f.name))]
    return []


def _tensors(out: Any) -> Iterable[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return (out,)
    return tuple(t for t in out if isinstance(t, torch.Tensor)) if isinstance(out, tuple) else ()
