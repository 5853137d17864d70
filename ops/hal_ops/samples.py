"""Samples: the inputs on which an operator is judged, the same bits on every machine.

A sample is an input recipe (``inputs(draw, **axes)``) at one set of axes in one input family. The grids below cover the
released geometries at decode and prefill sizes, small odd sizes and no tokens at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal.operator import Sample
from hal_ops import generator

FAMILIES = ("normal", "positive", "outliers", "rows")

#: Geometry of the released models, by the axis letters that contracts use.
FLASH: Mapping[str, int] = {"D": 4096, "H": 64, "d": 512, "Q": 1024, "G": 8, "O": 1024, "E": 256, "I": 2048, "k": 512}
PRO: Mapping[str, int] = {"D": 7168, "H": 128, "d": 512, "Q": 1536, "G": 16, "O": 1024, "E": 384, "I": 3072, "k": 1024}


@dataclass(frozen=True)
class Draw:
    """Draws the tensors of one sample; every tensor has its own key, so order of drawing does not matter."""

    key: str
    family: str
    dtype: torch.dtype = torch.bfloat16

    def act(self, name: str, *shape: int) -> Tensor:
        """Activations [*shape] of the sample's family in the carrier dtype."""
        return generator.draw(self.family, f"{self.key}/{name}", shape).to(self.dtype)

    def f32(self, name: str, *shape: int, scale: float = 1.0, center: float = 0.0) -> Tensor:
        """float32 values [*shape], normal around ``center``."""
        return generator.normal(f"{self.key}/{name}", shape) * scale + center

    def weight(self, name: str, *shape: int) -> Tensor:
        """A dense weight [*shape] in the carrier dtype, scaled by 1/sqrt(fan-in)."""
        factor: float = shape[-1] ** -0.5
        return (generator.normal(f"{self.key}/{name}", shape) * factor).to(self.dtype)

    def ints(self, name: str, *shape: int, low: int = 0, high: int) -> Tensor:
        """int64 values in [low, high)."""
        return generator.integers(f"{self.key}/{name}", shape, low, high)


Inputs = Callable[..., tuple[Any, ...]]


def grid(
    inputs: Inputs,
    axes: Sequence[Mapping[str, Any]],
    *,
    families: Sequence[str] = ("normal", "outliers"),
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], Iterable[Sample]]:
    """Samples of ``inputs`` at every set of axes and family; sets with ``full=True`` belong to the long run only."""

    def samples() -> Iterable[Sample]:
        for chosen in axes:
            sizes = {a: v for a, v in chosen.items() if a != "full"}
            label = ",".join(f"{a}{v}" for a, v in sizes.items())
            for family in families:
                draw = Draw(f"{inputs.__module__}.{inputs.__qualname__}/{label}/{family}", family, dtype)
                yield Sample(
                    f"{label}/{family}",
                    sizes,
                    family,
                    bool(chosen.get("full", False)),
                    partial(inputs, draw, **sizes),
                )

    return samples


def token_grid(*names: str, odd: Mapping[str, int], quick: int = 1, prefill: int = 512) -> list[dict[str, Any]]:
    """Axes for operators over ``T`` tokens: Flash and Pro at decode and prefill, then odd sizes and no tokens.

    ``names`` are the letters taken from :data:`FLASH` and :data:`PRO`; ``odd`` gives the same letters for the small cases.
    """
    grid: list[dict[str, Any]] = []
    for geometry in (FLASH, PRO):
        constants = {n: geometry[n] for n in names}
        grid.append({"T": quick, **constants})
        grid += [{"T": t, **constants, "full": True} for t in (8, 64, prefill)]
    return grid + [{"T": t, **odd} for t in (0, 1, 5)]


def _leaves(value: Any) -> Iterable[Tensor]:
    """The tensors inside an argument: itself, or the fields of a dataclass such as a weight."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from _leaves(getattr(value, f.name))


def digest(arguments: Iterable[Any]) -> int:
    """CRC-32 over the bytes of every tensor in ``arguments`` (weights included): two machines saw the same inputs."""
    crc = 0
    for t in (leaf for value in arguments for leaf in _leaves(value) if leaf.numel()):
        crc = zlib.crc32(t.contiguous().flatten().view(torch.uint8).numpy().tobytes(), crc)
    return crc
