"""Kernels: a backend's implementations, each declared next to its code with its claim as data.

A claim says for which dtypes, axes, layouts and architectures a kernel serves an operator, so that a generator can
sample inside, at the edge of and outside. "Supported" is nothing but an empty list of reasons.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hal.contract import Call, dtype_name

Reproducibility = Literal["R0", "R1", "R2"]
Layout = Literal["contiguous", "rows", "any"]
EVIDENCE = (
    "hardware",
    "other-hardware",
    "simulated-runtime",
    "lowered-cpu",
    "interpreted",
    "compiled-only",
    "schema-only",
    "untested",
)


@dataclass(frozen=True)
class Reason:
    """Why a kernel cannot serve a call: a stable code for programs, a sentence for people."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True)
class Range:
    """Sizes an axis may take: ``min`` to ``max`` (``None`` is no limit) in steps of ``multiple``."""

    min: int = 0
    max: int | None = None
    multiple: int = 1

    def reason(self, axis: str, size: int) -> Reason | None:
        """Why ``size`` is outside, or ``None``."""
        if size < self.min:
            return Reason("axis-too-small", f"{axis} = {size}, claimed from {self.min}")
        if self.max is not None and size > self.max:
            return Reason("axis-too-large", f"{axis} = {size}, claimed up to {self.max}")
        if size % self.multiple:
            return Reason("axis-multiple", f"{axis} = {size}, claimed in multiples of {self.multiple}")
        return None


@dataclass(frozen=True)
class Claim:
    """What a kernel serves, as data.

    ``dtypes`` and ``layouts`` go by argument name (an argument not named must be contiguous and may have any dtype of
    the contract); ``axes`` by axis name; ``arch`` lists architectures (empty: every one that the backend probes).
    """

    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    axes: Mapping[str, Range] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    arch: tuple[str, ...] = ()

    def reasons(self, call: Call, arch: str) -> list[Reason]:
        """Every reason against serving ``call`` on ``arch``; empty means claimed."""
        out = [] if not self.arch or arch in self.arch else [self._arch_reason(arch)]
        for name, meta in call.tensors.items():
            allowed = self.dtypes.get(name)
            if allowed is not None and meta.dtype not in allowed:
                names = ", ".join(map(dtype_name, allowed))
                out.append(Reason("dtype", f"{name} is {dtype_name(meta.dtype)}, claimed {names}"))
            layout = self.layouts.get(name, "contiguous")
            if (layout == "contiguous" and not meta.contiguous) or (layout == "rows" and not meta.rows):
                out.append(Reason("layout", f"{name} has strides {list(meta.strides)}, claimed {layout}"))
        found = (r.reason(a, call.axes[a]) for a, r in self.axes.items() if a in call.axes)
        return out + [r for r in found if r]

    def _arch_reason(self, arch: str) -> Reason:
        return Reason("arch", f"architecture {arch}, claimed {', '.join(self.arch)}")


def no_refusal(call: Call) -> Iterable[Reason]:  # noqa: ARG001
    """The default of ``refuse``: nothing beyond the claim."""
    return ()


@dataclass(frozen=True)
class Kernel:
    """One registered implementation of one operator version."""

    operator: str
    version: int
    fn: Callable[..., Any]
    claim: Claim
    refuse: Callable[[Call], Iterable[Reason]]
    priority: int
    evidence: str
    reproducibility: Reproducibility
    graph: bool
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Unique name: ``module:function``."""
        return f"{self.fn.__module__}:{self.fn.__qualname__}"

    @property
    def source_hash(self) -> str:
        """SHA-256 over the source of the kernel's module, so that evidence expires when code changes."""
        module = inspect.getmodule(self.fn)
        text = inspect.getsource(module if module is not None else self.fn)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def reasons(self, call: Call, arch: str) -> list[Reason]:
        """Claim reasons, then the kernel's own coded ones (asked only inside the claim)."""
        return self.claim.reasons(call, arch) or list(self.refuse(call))


def kernel(
    operator: str,
    *,
    version: int = 1,
    claim: Claim | None = None,
    refuse: Callable[[Call], Iterable[Reason]] = no_refusal,
    priority: int = 0,
    evidence: str = "untested",
    reproducibility: Reproducibility = "R0",
    graph: bool = False,
    params: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare the decorated function as a kernel of ``operator``; a plugin hands the result to ``register``.

    Args:
        operator: name of the operator; its parameters must be the function's, name for name.
        version: version of the operator's contract that the kernel implements.
        claim: dtypes, axes, layouts and architectures served; default: everything that the contract admits.
        refuse: further coded reasons against a call inside the claim. Binding asks at both edges of a bucket, so a reason
            must not single out a size of a variable axis between sizes that are served.
        priority: among kernels without reasons the highest wins; a tie is an error naming both.
        evidence: strongest evidence of correctness, one of :data:`EVIDENCE`.
        reproducibility: ``R0`` none, ``R1`` same bits twice, ``R2`` also independent of the batch.
        graph: whether a device graph may capture it.
        params: tuned parameters, recorded in plans.
    """

    def declare(fn: Callable[..., Any]) -> Kernel:
        return Kernel(
            operator,
            version,
            fn,
            claim or Claim(),
            refuse,
            priority,
            evidence,
            reproducibility,
            graph,
            dict(params or {}),
        )

    return declare
