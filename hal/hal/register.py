"""The ``register`` callback that a plugin gets: it checks every kernel before the host may use it."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from hal.kernel import EVIDENCE, Kernel, Reproducibility
from hal.operator import OPERATORS, Operator

_EVIDENCE = re.compile(r"([a-z-]+)(\([^()]+\))?")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"``, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass
class Registrar:
    """Collects the kernels of one plugin, by operator, and every error; each names plugin, operator and kernel."""

    plugin: str
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def add(self, kernel: Kernel) -> None:
        """Check ``kernel`` and keep it if nothing speaks against it."""
        if not isinstance(kernel, Kernel):
            right = "right is a kernel made with @hal.kernel.kernel(...)"
            self.errors.append(f"plugin {self.plugin}: register was given {kernel!r}; {right}")
            return
        found = self._faults(kernel)
        where = f"plugin {self.plugin}, operator {kernel.operator}, kernel {kernel.name}"
        self.errors.extend(f"{where}: {fault}" for fault in found)
        if not found:
            self.kernels.setdefault(kernel.operator, []).append(kernel)

    def frozen(self) -> Mapping[str, tuple[Kernel, ...]]:
        """Operator name -> kernels, sorted by name, so that the order of registration decides nothing."""
        return {op: tuple(sorted(self.kernels[op], key=lambda k: k.name)) for op in sorted(self.kernels)}

    def _faults(self, kernel: Kernel) -> list[str]:
        op = OPERATORS.get(kernel.operator)
        if op is None:
            hint = suggestion(kernel.operator, OPERATORS)
            return [f"no operator is called {kernel.operator!r}{hint}; {len(OPERATORS)} operators are declared"]
        faults = list(_label_faults(kernel))
        if kernel.version != op.version:
            faults.append(f"implements version {kernel.version}, the operator has version {op.version}")
        faults += [*_signature_faults(op, kernel), *_claim_faults(op, kernel)]
        if any(k.name == kernel.name for k in self.kernels.get(op.name, ())):
            faults.append("is registered twice; right is one registration for each kernel name")
        return faults


def _label_faults(kernel: Kernel) -> Iterable[str]:
    label = _EVIDENCE.fullmatch(kernel.evidence)
    if label is None or label[1] not in EVIDENCE:
        yield f"evidence is {kernel.evidence!r}, right is one of {', '.join(EVIDENCE)}"
    classes = get_args(Reproducibility)
    if kernel.reproducibility not in classes:
        yield f"reproducibility is {kernel.reproducibility!r}, right is one of {', '.join(classes)}"


def _signature_faults(op: Operator[..., Any], kernel: Kernel) -> Iterable[str]:
    try:
        seen = inspect.signature(kernel.fn)
    except (TypeError, ValueError):
        yield f"has no readable signature, right is {_text(op.contract.signature)}"
        return
    if not _same(op.contract.signature, seen):
        yield f"parameters are {_text(seen)}, the operator's are {_text(op.contract.signature)}"


def _same(right: inspect.Signature, seen: inspect.Signature) -> bool:
    """Same names in the same order, passed the same way, with the operator's defaults where it has any."""
    if list(right.parameters) != list(seen.parameters):
        return False
    pairs = zip(right.parameters.values(), seen.parameters.values(), strict=True)
    return all(a.kind == b.kind and (a.default is a.empty or _equal(a.default, b.default)) for a, b in pairs)


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _text(signature: inspect.Signature) -> str:
    """The parameters without annotations: ``(x, weight, eps)``."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _claim_faults(op: Operator[..., Any], kernel: Kernel) -> Iterable[str]:
    """Names in the claim that no call ever has: dispatch would pass over them, and the claim be wider than meant."""
    contract, claim = op.contract, kernel.claim
    tensors = sorted({p.name for p in contract.inputs})
    roots = set(contract.signature.parameters)
    for name in dict.fromkeys([*claim.dtypes, *claim.layouts]):
        if name not in tensors and not ("." in name and name.split(".")[0] in roots):
            yield f"the claim names tensor {name!r}{suggestion(name, tensors)}; tensors are {', '.join(tensors)}"
    axes = sorted({d.text for p in contract.inputs for d in p.dims if d.code is None} - roots)
    for name in claim.axes:
        if name not in axes:
            yield f"the claim names axis {name!r}{suggestion(name, axes)}; axes are {', '.join(axes)}"
