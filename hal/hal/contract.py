"""The shape-and-dtype contract of an operator: one line of text, parsed once, read by everyone.

``"x[T,D]:act, weight[D]:f32 -> y[T,D]:x"`` names every tensor argument with its axes and its dtype class, then
every output. An axis is a name (bound by the first argument that shows it), or an expression over axes and integer
arguments (``ceil(K,128)``, ``2*I``, ``k``). ``N*`` at the front matches any number of leading dimensions and binds
their product. A trailing ``?`` allows ``None``. The same text validates calls, names the axes that claims and
costs speak of, and is the shape rule for fake tensors.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import Any

import torch

from hal.errors import ContractError, InputError

CARRIERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: dtype class -> dtypes it admits. float64 stands in for float32 when a reference runs in double precision.
DTYPE_CLASSES: Mapping[str, tuple[torch.dtype, ...]] = {
    "act": CARRIERS,
    "any": (),
    "f32": (torch.float32, torch.float64),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    "scale": (torch.float8_e8m0fnu, torch.float32, torch.float64),
    "fp4": (torch.int8, torch.uint8),
    "i8": (torch.int8,),
    "i32": (torch.int32,),
    "i64": (torch.int64,),
    "int": (torch.int32, torch.int64),
    "bool": (torch.bool,),
}

_TENSOR = re.compile(r"\s*([\w.]+)\[([^\]]*)\]:([\w|]+)(\??)\s*,?")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``: the spelling used in claims, keys and messages."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Dim:
    """One axis of a pattern: a name, an expression, or ``N*`` (``leading``)."""

    text: str
    leading: bool
    code: CodeType | None

    @classmethod
    def parse(cls, text: str) -> Dim:
        """Parse ``T``, ``N*`` or an expression such as ``ceil(K,128)``."""
        if text.endswith("*") and _NAME.match(text[:-1]):
            return cls(text[:-1], True, None)
        return cls(text, False, None if _NAME.match(text) else compile(text, "<axis>", "eval"))

    def value(self, scope: Mapping[str, Any]) -> int:
        """The dimension's size in ``scope`` (axes and integer arguments)."""
        if self.code is None:
            return int(scope[self.text])
        return int(eval(self.code, {"__builtins__": {}, "ceil": _ceil, "max": max, "min": min}, dict(scope)))


@dataclass(frozen=True)
class Pattern:
    """One tensor of a contract: its name, axes, admitted dtypes and whether ``None`` may stand for it."""

    name: str
    dims: tuple[Dim, ...]
    dtypes: str
    optional: bool

    def admits(self, dtype: torch.dtype) -> bool:
        """Whether ``dtype`` belongs to one of the pattern's classes."""
        classes = self.dtypes.split("|")
        return "any" in classes or any(dtype in DTYPE_CLASSES[c] for c in classes)

    def text(self) -> str:
        """The pattern as written: ``x[T,D]``."""
        return f"{self.name}[{','.join(d.text + '*' * d.leading for d in self.dims)}]"


def _split_dims(text: str) -> list[str]:
    """Split at commas outside parentheses: ``"E,ceil(K,128)"`` -> ``["E", "ceil(K,128)"]``."""
    parts = re.split(r",(?![^()]*\))", text)
    return [p.strip() for p in parts if p.strip()]


def _parse_side(text: str) -> tuple[Pattern, ...]:
    patterns, at = [], 0
    while text[at:].strip():
        found = _TENSOR.match(text, at)
        if found is None:
            raise ContractError(f"contract text {text!r} cannot be parsed at {text[at : at + 20]!r}")
        name, dims, dtypes, optional = found.groups()
        patterns.append(Pattern(name, tuple(map(Dim.parse, _split_dims(dims))), dtypes, bool(optional)))
        at = found.end()
    return tuple(patterns)


@dataclass(frozen=True)
class TensorMeta:
    """What dispatch may know of a tensor: shape, strides (elements), dtype and device type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorMeta:
        """Read the metadata of ``t`` (real, meta or fake)."""
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device.type)

    @property
    def contiguous(self) -> bool:
        """Whether the strides are those of a fresh row-major tensor (unit axes do not matter)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True

    @property
    def rows(self) -> bool:
        """Whether the last axis is dense, whatever the stride between rows."""
        return not self.shape or self.shape[-1] <= 1 or self.strides[-1] == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def flatten(name: str, value: Any) -> dict[str, Any]:
    """Name every tensor and scalar inside an argument; a dataclass becomes ``name.field`` entries."""
    if isinstance(value, torch.Tensor):
        return {name: TensorMeta.of(value)}
    if is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        for f in fields(value):
            out |= flatten(f"{name}.{f.name}", getattr(value, f.name))
        return out
    return {name: value}


@dataclass(frozen=True)
class Call:
    """One call of an operator reduced to what decides dispatch: tensor metadata, scalars and bound axes."""

    operator: str
    tensors: Mapping[str, TensorMeta]
    scalars: Mapping[str, Any]
    axes: Mapping[str, int]

    def describe(self) -> str:
        """One line: axes, dtypes and scalars, for messages and ledgers."""
        axes = " ".join(f"{k}={v}" for k, v in self.axes.items())
        dtypes = " ".join(f"{k}:{dtype_name(m.dtype)}" for k, m in self.tensors.items())
        scalars = " ".join(f"{k}={v}" for k, v in self.scalars.items() if v is not None)
        return f"{axes} | {dtypes}" + (f" | {scalars}" if scalars else "")


@dataclass(frozen=True)
class Contract:
    """The parsed contract of one operator."""

    operator: str
    inputs: tuple[Pattern, ...]
    outputs: tuple[Pattern, ...]
    signature: inspect.Signature

    @classmethod
    def parse(cls, fn: Callable[..., Any], text: str) -> Contract:
        """Parse ``text`` for ``fn``; every tensor named must be a parameter (or a field of one)."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ContractError(f"operator {fn.__name__}: contract {text!r} has no '->'")
        signature = inspect.signature(fn)
        contract = cls(fn.__name__, _parse_side(left), _parse_side(right), signature)
        for p in contract.inputs:
            if p.name.split(".")[0] not in signature.parameters:
                raise ContractError(f"operator {fn.__name__}: contract names {p.name!r}, which is no parameter")
        contract._check_words()
        return contract

    @property
    def axis_names(self) -> frozenset[str]:
        """Every axis that an input's pattern can bind."""
        return frozenset(d.text for p in self.inputs for d in p.dims if d.code is None)

    def _check_words(self) -> None:
        """Refuse unknown dtype classes and axes when the operator is declared, not at its first call."""
        known = self.axis_names | set(self.signature.parameters) | {"ceil", "max", "min"}
        for p in (*self.inputs, *self.outputs):
            classes = set(DTYPE_CLASSES) | (set(self.signature.parameters) if p in self.outputs else set())
            for word in set(p.dtypes.split("|")) - classes:
                raise ContractError(f"operator {self.operator}: dtype class {word!r} of {p.text()} is unknown")
            for word in {n for d in p.dims for n in (d.code.co_names if d.code else (d.text,))} - known:
                raise ContractError(f"operator {self.operator}: axis {word!r} of {p.text()} is bound by no input")

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Validate one call and bind its axes.

        Raises:
            InputError: wrong arity, rank, axis or dtype; the message names operator, argument, seen and right.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            raise InputError(f"{self.operator}: {e}; the signature is {self.operator}{self.signature}") from e
        bound.apply_defaults()
        flat: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            flat |= flatten(name, value)
        tensors = {k: v for k, v in flat.items() if isinstance(v, TensorMeta)}
        scalars = {k: v for k, v in flat.items() if not isinstance(v, TensorMeta)}
        return Call(self.operator, tensors, scalars, self._bind_axes(tensors, scalars))

    def _bind_axes(self, tensors: Mapping[str, TensorMeta], scalars: Mapping[str, Any]) -> dict[str, int]:
        axes: dict[str, int] = {}
        later: list[tuple[Pattern, int, Dim, int]] = []
        for p in self.inputs:
            meta = tensors.get(p.name)
            if meta is None:
                self._check_absent(p, scalars)
                continue
            if not p.admits(meta.dtype):
                raise InputError(f"{self.operator}: {p.name} is {dtype_name(meta.dtype)}, right is {p.dtypes}")
            for i, (dim, size) in enumerate(self._align(p, meta)):
                if dim.code is None and dim.text not in axes and dim.text not in scalars:
                    axes[dim.text] = size
                else:
                    later.append((p, i, dim, size))
        scope = {k: v for k, v in scalars.items() if isinstance(v, int)} | axes
        for p, i, dim, size in later:
            if dim.value(scope) != size:
                shape = list(tensors[p.name].shape)
                raise InputError(
                    f"{self.operator}: {p.text()} has shape {shape}; axis {i} ({dim.text}) should be {dim.value(scope)}"
                )
        return axes

    def _check_absent(self, p: Pattern, scalars: Mapping[str, Any]) -> None:
        if p.optional and scalars.get(p.name) is None:
            return
        seen = type(scalars.get(p.name)).__name__
        raise InputError(f"{self.operator}: {p.name} is {seen}, right is a tensor {p.text()} of {p.dtypes}")

    def _align(self, p: Pattern, meta: TensorMeta) -> list[tuple[Dim, int]]:
        """Pair the pattern's dims with sizes; leading dimensions fold into one product."""
        shape, dims = meta.shape, p.dims
        if dims and dims[0].leading:
            lead = len(shape) - (len(dims) - 1)
            if lead >= 0:
                return [(dims[0], math.prod(shape[:lead])), *zip(dims[1:], shape[lead:], strict=True)]
        elif len(shape) == len(dims):
            return list(zip(dims, shape, strict=True))
        raise InputError(f"{self.operator}: {p.name} has shape {list(shape)}, right is {p.text()}")

    def output_metas(self, call: Call) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of every output of ``call``: the shape rule."""
        scope = {k: v for k, v in call.scalars.items() if isinstance(v, int)} | dict(call.axes)
        return tuple((self._out_shape(p, call, scope), self._out_dtype(p, call)) for p in self.outputs)

    def _out_shape(self, p: Pattern, call: Call, scope: Mapping[str, Any]) -> tuple[int, ...]:
        if not (p.dims and p.dims[0].leading):
            return tuple(d.value(scope) for d in p.dims)
        source = next(q for q in self.inputs if q.dims and q.dims[0] == p.dims[0])
        shape = call.tensors[source.name].shape
        return shape[: len(shape) - len(source.dims) + 1] + tuple(d.value(scope) for d in p.dims[1:])

    def _out_dtype(self, p: Pattern, call: Call) -> torch.dtype:
        source = call.tensors.get(p.dtypes)
        if source is not None:
            return source.dtype
        named = call.scalars.get(p.dtypes)
        if isinstance(named, torch.dtype):
            return named
        wide = any(m.dtype == torch.float64 for m in call.tensors.values())
        return torch.float64 if wide and p.dtypes == "f32" else DTYPE_CLASSES[p.dtypes][0]
