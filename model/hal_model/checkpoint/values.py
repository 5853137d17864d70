"""Whether decoded weights have sane values: finds bytes read as integers, damaged scales and NaN codes (fault B20)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_model.config import ModelConfig
from hal_model.config_fields import raise_problems
from hal_model.inventory import FP8_BLOCK, Parameter, parameters
from hal_ops import formats

if TYPE_CHECKING:
    from hal_model.checkpoint.reader import Checkpoint

#: ``progress(done_bytes, total_bytes, label)``
Progress = Callable[[int, int, str], None] | None

_CHUNK = 1 << 19  # elements of a plain weight decoded at a time


@dataclass(frozen=True)
class Stats:
    """Of one decoded tensor: element count, non-finite count, mean, root mean square and largest magnitude."""

    count: int
    nonfinite: int
    mean: float
    rms: float
    largest: float


@dataclass(frozen=True)
class Band:
    """Limits on |mean|, on the largest magnitude, and on |mean|/rms of tensors with ``_MANY`` elements or more."""

    mean: float
    largest: float
    bias: float


_MANY = 4096
# A trained linear is nearly balanced around zero and far below 128; code bytes read as integers are all positive.
LINEAR = Band(mean=4.0, largest=128.0, bias=0.5)
PLAIN = Band(mean=1e3, largest=1e4, bias=math.inf)


def check_values(
    checkpoint: Checkpoint, config: ModelConfig, names: Iterable[str] | None = None, progress: Progress = None
) -> None:
    """Decode the weights ``names`` (all of ``config`` that are stored, by default) and judge each against its band.

    The checkpoint must have passed `verify`: shapes are taken as right here. Reads and decodes all the data.

    Raises:
        CheckpointError: naming every tensor with non-finite values, a value or mean outside its band, or an expert
            number outside the model (ten, then a count).
    """
    wanted = None if names is None else set(names)
    chosen = [p for p in parameters(config) if p.name in checkpoint and (wanted is None or p.name in wanted)]
    total = sum(checkpoint.spec(p.name).nbytes for p in chosen)
    done = 0
    problems: list[str] = []
    for parameter in chosen:
        problems += _judge(checkpoint, config, parameter)
        done += checkpoint.spec(parameter.name).nbytes
        if progress is not None:
            progress(done, total, parameter.name)
    raise_problems(str(checkpoint.path), problems)


def _judge(checkpoint: Checkpoint, config: ModelConfig, parameter: Parameter) -> Iterator[str]:
    weight = checkpoint.load(parameter.name)
    where = f"tensor {parameter.name} in {checkpoint.stored(parameter.name).file.name}"
    if parameter.kind == "table":
        low, high = int(weight.min()), int(weight.max())
        if low < 0 or high >= config.n_routed_experts:
            yield f"{where} holds experts {low} to {high}; right: 0 to {config.n_routed_experts - 1}"
        return
    coded = weight.dtype in (torch.int8, torch.float8_e4m3fn)
    scale = checkpoint.load(parameter.scale_name) if coded else None
    band = LINEAR if parameter.kind in ("dense", "expert") else PLAIN
    yield from (f"{where} {clause}" for clause in out_of_band(stats(weight, scale), band))


def out_of_band(found: Stats, band: Band) -> Iterator[str]:
    """One clause per limit of ``band`` that ``found`` breaks."""
    if found.nonfinite:
        yield f"has {found.nonfinite} non-finite values of {found.count}; right: none"
    if found.largest > band.largest:
        yield f"has largest magnitude {found.largest:.6g}; right: at most {band.largest:g}"
    if abs(found.mean) > band.mean:
        yield f"has mean {found.mean:.6g}; right: at most {band.mean:g} in magnitude"
    elif found.count >= _MANY and abs(found.mean) > band.bias * found.rms:
        yield f"has mean {found.mean:.6g} with rms {found.rms:.6g}; right: |mean| at most {band.bias:g} of rms"


def stats(weight: Tensor, scale: Tensor | None) -> Stats:
    """`Stats` of a stored weight, decoded in float32 a few rows at a time.

    Args:
        weight: plain float of any shape, ``float8_e4m3fn`` [N, K], or packed FP4 ``int8`` [N, K/2].
        scale: ``float8_e8m0fnu`` or float32 [ceil(N/128), ceil(K/128)] or [N, K/32]; None for a plain float.
    """
    count = nonfinite = 0
    total = square = largest = 0.0
    for values in _decoded_chunks(weight, scale):
        count += values.numel()
        part = values.sum().item()
        if not math.isfinite(part):  # something is not finite, or only the sum overflowed
            finite = values[torch.isfinite(values)]
            nonfinite += values.numel() - finite.numel()
            values = finite
            part = values.sum(dtype=torch.float64).item()
        total += part
        square += torch.dot(values.flatten(), values.flatten()).item()
        low, high = torch.aminmax(values) if values.numel() else (values.sum(), values.sum())
        largest = max(largest, -low.item(), high.item())
    kept = max(count - nonfinite, 1)
    return Stats(count, nonfinite, total / kept, math.sqrt(square / kept), largest)


def _decoded_chunks(weight: Tensor, scale: Tensor | None) -> Iterator[Tensor]:
    """Values in float32: pieces of a plain weight, 128 rows [<= 128, K] of a quantised one."""
    if scale is None:
        yield from (part.float() for part in _split(weight.reshape(-1), _CHUNK))
    elif weight.dtype == torch.int8:
        for part, factors in zip(_split(weight, FP8_BLOCK), _split(scale, FP8_BLOCK), strict=True):
            yield formats.dequantize_weight_fp4(part, factors)
    else:
        for part, factors in zip(_split(weight, FP8_BLOCK), _split(scale, 1), strict=True):
            yield formats.dequantize_weight_fp8(part, factors)


def _split(x: Tensor, rows: int) -> Iterator[Tensor]:
    return (x[start : start + rows] for start in range(0, x.shape[0], rows))
