"""Registration of a backend's kernels: every kernel is checked against its operator, every fault is collected."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import torch

from hal.errors import ContractError
from hal.kernel import EVIDENCE, Kernel, Reproducibility
from hal.operator import OPERATORS, Operator

AnyOperator = Operator[..., Any]


class Registrar:
    """The ``register`` callback that a plugin gets: collects kernels and faults; each fault names the plugin."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.errors: list[str] = []
        self._kernels: dict[str, dict[str, Kernel]] = {}
        self._closed = False

    def __call__(self, kernel: Kernel) -> None:
        """Check and take one kernel; never raises for a fault of the kernel, so that all are reported at once."""
        if self._closed:
            raise ContractError(f"{self.label}: register was called after hal_register had returned")
        faults = list(_shape_faults(kernel))
        if not faults:
            known = self._kernels.setdefault(kernel.operator, {})
            faults = list(_faults(kernel))
            if kernel.name in known:
                faults.append(f"{_where(kernel)}: a kernel of that name is registered already")
            known[kernel.name] = kernel
        self.errors += [f"{self.label}: {f}" for f in faults]

    def close(self) -> tuple[Mapping[str, tuple[Kernel, ...]], tuple[str, ...]]:
        """End registration: all kernels sorted by operator and name and no fault, or no kernel and every fault."""
        self._closed = True
        if self.errors:
            return MappingProxyType({}), tuple(self.errors)
        taken = {op: tuple(ks[n] for n in sorted(ks)) for op, ks in sorted(self._kernels.items())}
        return MappingProxyType(taken), ()


def _where(kernel: Kernel) -> str:
    return f"operator {kernel.operator}: kernel {kernel.name}"


def _shape_faults(kernel: object) -> Iterator[str]:
    """Faults that leave nothing else to check."""
    if not isinstance(kernel, Kernel):
        yield f"register got {kernel!r}, right is a Kernel (decorate the function with hal.kernel.kernel)"
    elif not (hasattr(kernel.fn, "__qualname__") and hasattr(kernel.fn, "__module__")):
        yield f"operator {kernel.operator}: kernel function {kernel.fn!r} has no name, right is a plain function"


def _faults(kernel: Kernel) -> Iterator[str]:
    where = _where(kernel)
    if not _known_evidence(kernel.evidence):
        yield f"{where}: evidence {kernel.evidence!r} is none of {', '.join(EVIDENCE)}"
    if kernel.reproducibility not in get_args(Reproducibility):
        yield f"{where}: reproducibility {kernel.reproducibility!r} is none of {', '.join(get_args(Reproducibility))}"
    op = OPERATORS.get(kernel.operator)
    if op is None:
        close = difflib.get_close_matches(kernel.operator, OPERATORS, n=1)
        yield f"{where}: the operator is unknown" + (f"; did you mean {close[0]!r}?" if close else "")
        return
    if kernel.version != op.version:
        yield f"{where}: implements version {kernel.version}, the operator is at version {op.version}"
    yield from _signature_faults(kernel, op)
    yield from _claim_faults(kernel, op)


def _known_evidence(label: str) -> bool:
    """``hardware``, or a label with its detail such as ``compiled-only(gfx942)``."""
    found = re.fullmatch(r"([a-z-]+)(\([^()]+\))?", label)
    return found is not None and found[1] in EVIDENCE


def _signature_faults(kernel: Kernel, op: AnyOperator) -> Iterator[str]:
    right = list(op.contract.signature.parameters)
    try:
        seen = list(inspect.signature(kernel.fn).parameters)
    except ValueError as e:
        yield f"{_where(kernel)}: its signature cannot be read: {e}"
        return
    if seen != right:
        yield f"{_where(kernel)}: parameters are ({', '.join(seen)}), right are ({', '.join(right)})"


def _claim_faults(kernel: Kernel, op: AnyOperator) -> Iterator[str]:
    """A claim on a name that no call binds would never be looked at."""
    tensors, axes, claim = _tensors(op), _axes(op), kernel.claim
    for what, names in (("dtypes", claim.dtypes), ("layouts", claim.layouts)):
        for name in names:
            if name not in tensors:
                yield f"{_where(kernel)}: claim.{what} names {name!r}, tensor arguments are {', '.join(tensors)}"
    for name in claim.axes:
        if name not in axes:
            yield f"{_where(kernel)}: claim.axes names {name!r}, axes are {', '.join(axes)}"


def _axes(op: AnyOperator) -> list[str]:
    """Axes that a call binds: named dimensions of inputs that are no argument."""
    named = (d.text for p in op.contract.inputs for d in p.dims if d.code is None)
    return list(dict.fromkeys(n for n in named if n not in op.contract.signature.parameters))


def _tensors(op: AnyOperator) -> list[str]:
    """Names of all tensors of a call as ``hal.contract.flatten`` gives them, fields of dataclasses included."""
    hints = get_type_hints(op.fn)
    inside = (leaf for p in op.contract.signature.parameters for leaf in _leaves(p, hints.get(p)))
    return list(dict.fromkeys([*(p.name for p in op.contract.inputs), *inside]))


def _leaves(name: str, annotation: Any) -> Iterator[str]:
    """Paths of the tensors in a value annotated so; ``X | None`` counts as ``X``."""
    for kind in get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, torch.Tensor):
            yield name
        elif isinstance(kind, type) and is_dataclass(kind):
            hints = get_type_hints(kind)
            for f in fields(kind):
                yield from _leaves(f"{name}.{f.name}", hints[f.name])
