"""Write a checkpoint of fresh weights in the official format, shard by shard, all or nothing (spec §4)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hal.errors import UsageError
from hal_model.checkpoint.initial import Initializer, Source, golden_source, pieces, random_source
from hal_model.checkpoint.reader import INDEX
from hal_model.checkpoint.safetensors_file import header_bytes
from hal_model.checkpoint.values import Progress
from hal_model.config import ModelConfig
from hal_model.inventory import Dense, Experts, Parameter, TensorSpec, parameters, tensors

SHARD_BYTES = 4 << 30
_ROOM = 1 << 20  # bytes kept for the JSON files beside the shards


@dataclass(frozen=True)
class Written:
    """What was written: tensors, bytes of tensors and shards."""

    path: Path
    tensors: int
    nbytes: int
    shards: int


@dataclass(frozen=True)
class _Item:
    parameter: Parameter
    spec: TensorSpec


def init_checkpoint(
    config: ModelConfig,
    out_dir: str | Path,
    *,
    seed: int = 0,
    experts: Experts = "fp4",
    dense: Dense = "fp8",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = None,
    initializer: Initializer = "random",
) -> Written:
    """Write a checkpoint with fresh weights; no more than a piece of one tensor is in memory at a time.

    Weights are a function of ``seed`` and the tensor's name. They are written to a hidden folder beside ``out_dir``
    that takes its name at the end; after any error, or Ctrl-C, nothing is left. No tokenizer is written.

    Args:
        config: the model; ``expert_dtype`` of the written ``config.json`` follows ``experts``.
        out_dir: folder to make; it may exist when empty.
        seed: of the random weights; golden ones know no seed.
        experts: storage of the routed experts.
        dense: storage of the other quantised linears; ``f32`` stores every floating-point tensor in F32.
        shard_bytes: most bytes of tensors in a shard (a larger tensor gets a shard of its own).
        progress: called with (bytes done, bytes in all, shard name) after each piece.
        initializer: ``random``, or ``golden`` for the weights of spec A.1 (unquantised) and A.4 (quantised).

    Raises:
        UsageError: ``out_dir`` is not empty, an argument is out of range, or the disk is too small or not writable.
    """
    out = Path(out_dir)
    if initializer not in ("random", "golden"):
        raise UsageError(f"initializer is {initializer!r}; right: 'random' or 'golden'")
    if shard_bytes <= 0:
        raise UsageError(f"shard_bytes is {shard_bytes}; right: above 0")
    shards = _shards(_items(config, experts, dense), shard_bytes)
    _check_target(out, sum(item.spec.nbytes for items in shards for item in items))
    source = golden_source() if initializer == "golden" else random_source(seed)
    try:
        with _all_or_nothing(out) as folder:
            total = _write_shards(folder, shards, source, config.n_routed_experts, progress)
            _write_json(folder / "config.json", _config_file(config, experts, dense))
            _write_json(folder / "generation_config.json", _generation_file(config))
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error}); right: a folder on a writable disk with room") from error
    return Written(out, sum(map(len, shards)), total, len(shards))


def _items(config: ModelConfig, experts: Experts, dense: Dense) -> Iterator[_Item]:
    """Each stored tensor with the parameter that it belongs to; weight and scale follow each other."""
    by_name = {parameter.name: parameter for parameter in parameters(config)}
    by_name |= {p.scale_name: p for p in by_name.values() if p.kind in ("dense", "expert")}
    for spec in tensors(config, experts, dense):
        yield _Item(by_name[spec.name], spec)


def _shards(items: Iterator[_Item], shard_bytes: int) -> list[list[_Item]]:
    """Items in file order, cut where a shard would grow too large; wide elements first, so that all data is aligned."""
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.spec.nbytes
    return [sorted(shard, key=lambda item: -item.spec.torch_dtype.itemsize) for shard in shards]


def _check_target(out: Path, nbytes: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "is not empty" if out.is_dir() else "is a file"
        raise UsageError(f"{out}: {kind}; right: a new or empty folder")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if nbytes + _ROOM > free:
        raise UsageError(f"{out}: needed {nbytes + _ROOM} bytes, free {free}; right: a larger disk or a smaller model")


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes ``out`` when the block ends well and vanishes otherwise."""
    made = [folder for folder in out.absolute().parents if not folder.exists()]
    partial = out.absolute().parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except BaseException:  # Ctrl-C included: nothing half-written may remain
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _write_shards(folder: Path, shards: list[list[_Item]], source: Source, experts: int, progress: Progress) -> int:
    total = sum(item.spec.nbytes for items in shards for item in items)
    weight_map: dict[str, str] = {}
    done = 0
    for number, items in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {item.spec.name: name for item in items}
        with (folder / name).open("wb") as stream:
            stream.write(header_bytes(item.spec for item in items))
            for item in items:
                for piece in pieces(item.parameter, item.spec, source, experts):
                    stream.write(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(done, total, name)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config_file(config: ModelConfig, experts: str, dense: str) -> dict[str, Any]:
    declared = experts if experts in ("fp4", "fp8") else None
    out = replace(config, expert_dtype=declared).to_dict()
    out["torch_dtype"] = "float32" if dense == "f32" else "bfloat16"
    if dense == "fp8" or declared:
        out["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    return out


def _generation_file(config: ModelConfig) -> dict[str, Any]:
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    return {**ends, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
