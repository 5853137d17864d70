"""Properties that hold for every operator's reference on its own samples (kinds K9, K15; faults B75, B76)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hal_ops  # noqa: F401  (declares the operators)
from hal.operator import OPERATORS, Sample
from hal_ops.samples import FLASH, PRO, digest

EVERY = pytest.mark.parametrize(
    "name", sorted(n for n, op in OPERATORS.items() if op.__module__.startswith("hal_ops."))
)


def small(name: str) -> Sample:
    """The largest of the quick samples that stays small: a batch with more than one row where there is one."""
    quick = [s for s in OPERATORS[name].samples() if not s.full and all(s.axes.values())]
    return max(quick, key=lambda s: (_elements(s) < 2**18, _rows(s), _elements(s)))


def _rows(s: Sample) -> int:
    return next(s.axes[a] for a in ("T", "R", "B") if a in s.axes)


def _elements(s: Sample) -> int:
    out = 1
    for v in s.axes.values():
        out *= v if isinstance(v, int) else 1
    return out


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The argument with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in fields(value)})
    return value


def filled(t: Tensor, byte: int) -> Tensor:
    """A buffer of the shape of ``t`` whose every byte is ``byte``."""
    raw = torch.full((t.numel() * t.dtype.itemsize,), byte, dtype=torch.uint8)
    return (raw.bool() if t.dtype == torch.bool else raw.view(t.dtype)).view(t.shape)


def sliced(t: Tensor) -> Tensor:
    """The same values as a slice of a buffer that is wider in every axis, at an offset, poison around them."""
    wide = filled(torch.empty([2 * n + 3 for n in t.shape], dtype=t.dtype), 0xFF)
    view = wide[tuple(slice(1, 2 * n + 1, 2) for n in t.shape)]
    view.copy_(t)
    return view


def turned(t: Tensor) -> Tensor:
    """The same values with the strides of a transposed tensor."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def outputs(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Results of the reference, then the written arguments."""
    op = OPERATORS[name]
    result = op.reference(*args)
    written = [op.contract.signature.bind(*args).arguments[w] for w in op.writes]
    return [*(result if isinstance(result, tuple) else () if result is None else (result,)), *written]


@pytest.mark.parametrize("view", [sliced, turned], ids=["slice", "transpose"])
@EVERY
def test_b75_strided_arguments_give_the_numbers_of_dense_ones(name: str, view: Callable[[Tensor], Tensor]) -> None:
    sample = small(name)
    dense = outputs(name, sample.make())
    args = tuple(mapped(a, view) for a in sample.make())
    assert any(not t.is_contiguous() for a in args for t in _tensors(a)) or view is turned
    strided = outputs(name, args)
    for a, b in zip(dense, strided, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if OPERATORS[name].judge.kind in ("bound", "topk") and a.is_floating_point():
            step = 2.0**-7 if a.dtype == torch.bfloat16 else 2.0**-20  # another order of sums, other vector lanes
            scale = a.double().abs().amax() if a.numel() else 0.0
            assert bool(((a.double() - b.double()).abs() <= step * scale).all())
        else:
            assert digest([a]) == digest([b])


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


@EVERY
def test_k15_a_second_run_gives_the_same_bits(name: str) -> None:
    """After memory full of NaN bytes has been freed, so that a result left unwritten would show."""
    sample = small(name)
    first = digest(outputs(name, sample.make()))
    poison = [torch.full((1 << 16,), 0xFF, dtype=torch.uint8) for _ in range(8)]
    del poison
    assert digest(outputs(name, sample.make())) == first


@EVERY
def test_outputs_of_finite_samples_are_finite(name: str) -> None:
    for sample in OPERATORS[name].samples():
        if not sample.full and _elements(sample) < 2**18:
            for t in outputs(name, sample.make()):
                if t.dtype in (torch.bfloat16, torch.float32):
                    assert bool(t.isfinite().all()), sample.id


def test_the_geometries_are_those_of_the_released_models() -> None:
    """Spec §1.1."""
    assert dict(FLASH) == {"D": 4096, "H": 64, "d": 512, "Q": 1024, "G": 8, "O": 1024, "E": 256, "I": 2048, "k": 512}
    assert dict(PRO) == {"D": 7168, "H": 128, "d": 512, "Q": 1536, "G": 16, "O": 1024, "E": 384, "I": 3072, "k": 1024}
