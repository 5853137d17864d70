"""Operators: ordinary typed functions whose body is the reference, and the one place where they register.

Calling an operator looks its implementation up in the *routes* that are active in this context: a list indexed by
the operator's number. Without a plan the routes are the checked references; under a plan they are the kernels that
``bind`` chose. That list index is the whole cost of the abstraction on the hot path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

from hal.contract import Call, Contract
from hal.errors import ContractError

P = ParamSpec("P")
R = TypeVar("R")
Route = Callable[..., Any]
Level = Literal["primitive", "fused", "block", "layer", "step"]
LEVELS: tuple[Level, ...] = ("primitive", "fused", "block", "layer", "step")


@dataclass(frozen=True)
class Cost:
    """Work of one call: FLOPs by the unit that does them, and the fewest bytes that must move."""

    flops: Mapping[str, float] = field(default_factory=dict)
    bytes: float = 0.0


@dataclass(frozen=True)
class Judge:
    """How a kernel's output is judged.

    ``kind``: ``exact`` (bitwise), ``bound`` (error bound from formats and reduction length), ``topk`` (a set, with the
    scores' own error as margin), ``distribution`` (sampling). ``reduction`` is the axis expression of the longest sum.
    """

    kind: Literal["exact", "bound", "topk", "distribution"]
    reduction: str = "1"


@dataclass(frozen=True)
class Sample:
    """One named input of an operator: ``make()`` draws the same bits on every machine."""

    id: str
    axes: Mapping[str, int]
    family: str
    full: bool
    make: Callable[[], tuple[Any, ...]]


class Operator(Generic[P, R]):
    """A declared operator. Calling it runs whatever the active plan chose; see the module's docstring."""

    def __init__(
        self,
        fn: Callable[P, R],
        contract: Contract,
        *,
        level: Level,
        version: int,
        variable: tuple[str, ...],
        writes: tuple[str, ...],
        composite: bool,
        cost: Callable[[Call], Cost] | None,
        judge: Judge,
        samples: Callable[[], Iterable[Sample]] | None,
    ) -> None:
        self.fn = fn
        self.name = fn.__name__
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__
        self.contract = contract
        self.level = level
        self.version = version
        self.variable = variable
        self.writes = writes
        self.composite = composite
        self.judge = judge
        self._cost = cost
        self._samples = samples
        self.index = len(OPERATORS)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return _ROUTES.get()[self.index](*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator {self.name} v{self.version} ({self.level})>"

    def reference(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the reference, and references only, on validated arguments."""
        with references():
            return self._checked(*args, **kwargs)

    def _checked(self, *args: Any, **kwargs: Any) -> Any:
        self.contract.call(args, kwargs)
        return self.fn(*args, **kwargs)

    def cost(self, call: Call) -> Cost:
        """FLOPs and bytes of ``call``; bytes default to every input read once and every output written once."""
        outputs = self.contract.output_metas(call)
        touched = sum(m.nbytes for m in call.tensors.values())
        touched += sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in outputs)
        stated = self._cost(call) if self._cost else Cost()
        return Cost(stated.flops, stated.bytes or float(touched))

    def samples(self) -> tuple[Sample, ...]:
        """The operator's samples, each with a unique id; empty only for operators declared without."""
        return tuple(self._samples()) if self._samples else ()

    def fake_outputs(self, call: Call, device: torch.device) -> Any:
        """Empty outputs of ``call`` on ``device`` by the shape rule: one tensor, a tuple, or ``None``."""
        metas = self.contract.output_metas(call)
        outs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in metas)
        return outs[0] if len(outs) == 1 else (outs or None)


OPERATORS: dict[str, Operator[..., Any]] = {}
_REFERENCES: list[Route] = []
_ROUTES: ContextVar[Sequence[Route]] = ContextVar("hal_routes", default=_REFERENCES)


def operator(
    contract: str,
    *,
    level: Level = "primitive",
    version: int = 1,
    variable: str = "T",
    writes: str = "",
    composite: bool = False,
    cost: Callable[[Call], Cost] | None = None,
    judge: Judge,
    samples: Callable[[], Iterable[Sample]] | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Declare an operator; the decorated function's body is its reference.

    Args:
        contract: tensors, axes and dtypes in the notation of :mod:`hal.contract`.
        level: place in the lattice; a composite's body calls operators of lower levels.
        variable: axes that change from step to step; all others are constants of a model.
        writes: names of the arguments that the operator mutates.
        composite: the body is also the decomposition: it consists of operator calls and shape-only tensor code.
        cost: FLOPs by unit (and bytes where the default is wrong) of a call.
        judge: how outputs of a kernel are judged against the reference.
        samples: yields the inputs that conformance uses.

    Raises:
        ContractError: duplicate name, unknown level, or a contract text that does not fit the signature.
    """

    def declare(fn: Callable[P, R]) -> Operator[P, R]:
        if fn.__name__ in OPERATORS:
            raise ContractError(f"operator {fn.__name__} is declared twice")
        if level not in LEVELS:
            raise ContractError(f"operator {fn.__name__}: level {level!r} is none of {', '.join(LEVELS)}")
        parsed = Contract.parse(fn, contract)
        for what, words, known in (
            ("writes", writes, set(parsed.signature.parameters)),
            ("variable axes", variable, parsed.axis_names | set(parsed.signature.parameters)),
        ):
            for word in set(words.split()) - known:
                raise ContractError(f"operator {fn.__name__}: {what} name {word!r}, which the contract does not")
        op = Operator(
            fn,
            parsed,
            level=level,
            version=version,
            variable=tuple(variable.split()),
            writes=tuple(writes.split()),
            composite=composite,
            cost=cost,
            judge=judge,
            samples=samples,
        )
        OPERATORS[op.name] = op
        _REFERENCES.append(op._checked)
        return op

    return declare


@contextlib.contextmanager
def routes(table: Sequence[Route]) -> Iterator[None]:
    """Run with ``table`` as the implementation of every operator, in this context only."""
    token = _ROUTES.set(table)
    try:
        yield
    finally:
        _ROUTES.reset(token)


def references() -> contextlib.AbstractContextManager[None]:
    """Run every operator's reference, whatever plan is active."""
    return routes(_REFERENCES)
