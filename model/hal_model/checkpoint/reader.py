"""A checkpoint on disk: opened from headers alone, every damage named, tensors mapped and not copied (spec §4)."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal_model.checkpoint.names import official_name
from hal_model.checkpoint.safetensors_file import Stored, map_file, read_header, view_tensor
from hal_model.checkpoint.values import Progress, check_values
from hal_model.checkpoint.verify import Report, verify
from hal_model.config import ModelConfig
from hal_model.config_fields import raise_problems, read_json
from hal_model.inventory import TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors of a checkpoint by official name; make one with `Checkpoint.open`.

    Attributes:
        path: the folder or file that was opened.
        notes: what was found and is not used (draft copies of the embedding, stray files), one clause each.
    """

    def __init__(self, path: Path, stored: dict[str, Stored], notes: tuple[str, ...]) -> None:
        self.path = path
        self.notes = notes
        self._stored = stored
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a folder (index and shards, or one ``model.safetensors``) or one safetensors file; reads headers only.

        Raises:
            CheckpointError: naming every shard that is missing, cut or damaged, and every tensor on which index and
                shards differ (the first ten, then a count).
        """
        path = Path(path)
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or folder; right: a checkpoint folder")
        notes: list[str] = []
        if path.is_file():
            found = read_header(path)
        elif (path / INDEX).is_file():
            found, notes = _read_sharded(path)
        elif (path / SINGLE).is_file():
            found = read_header(path / SINGLE)
        else:
            shards = len(list(path.glob("*.safetensors")))
            right = f"{INDEX} with its shards, or {SINGLE}"
            raise CheckpointError(f"{path}: holds {shards} safetensors files and no index; right: {right}")
        stored, skipped = _by_official_name(path, found)
        return cls(path, stored, (*notes, *skipped))

    @property
    def names(self) -> tuple[str, ...]:
        """Official names of all tensors, in file order."""
        return tuple(self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.spec.nbytes for stored in self._stored.values())

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def stored(self, name: str) -> Stored:
        """File, offset and spec of ``name``, the spec under the name that the file uses."""
        if name not in self._stored:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; right: a checkpoint that holds it")
        return self._stored[name]

    def spec(self, name: str) -> TensorSpec:
        """Stored dtype and shape of ``name``."""
        spec = self.stored(name).spec
        return TensorSpec(name, spec.dtype, spec.shape)

    def load(self, name: str) -> Tensor:
        """The tensor as stored: a private view of the mapped file (writing to it never changes the file), on the CPU.

        Raises:
            CheckpointError: no such tensor, or a scale that is NaN (UE8M0 byte 255), infinite, zero or negative.
        """
        stored = self.stored(name)
        if stored.file not in self._maps:
            self._maps[stored.file] = map_file(stored.file)
        tensor = view_tensor(self._maps[stored.file], stored)
        _check_scale(name, stored, tensor)
        return tensor

    def verify(self, config: ModelConfig) -> Report:
        """Compare names, shapes, dtypes and scale layout with ``config``; see `hal_model.checkpoint.verify.verify`."""
        return verify(self, config)

    def check_values(self, config: ModelConfig, names: Iterable[str] | None = None, progress: Progress = None) -> None:
        """Decode weights and judge their values; see `hal_model.checkpoint.values.check_values`. Reads all the data."""
        check_values(self, config, names, progress)

    def close(self) -> None:
        """Forget the mappings; tensors that were handed out keep theirs alive."""
        self._maps.clear()


def _check_scale(name: str, stored: Stored, tensor: Tensor) -> None:
    if stored.spec.dtype == "F8_E8M0":
        if bool((tensor.view(torch.uint8) == 255).any()):
            raise CheckpointError(f"{stored.file}: tensor {name} holds scale byte 255 (NaN); right: 0 to 254")
    elif name.endswith(".scale") and stored.spec.dtype == "F32":
        wrong = tensor[~(torch.isfinite(tensor) & (tensor > 0))]
        if wrong.numel():
            raise CheckpointError(f"{stored.file}: tensor {name} holds scale {wrong[0].item()}; right: finite, above 0")


def _by_official_name(path: Path, found: Iterable[Stored]) -> tuple[dict[str, Stored], list[str]]:
    stored: dict[str, Stored] = {}
    notes, problems = [], []
    for item in found:
        name = official_name(item.spec.name)
        if name is None:
            notes.append(f"tensor {item.spec.name} is a draft copy of a shared tensor and is not used")
        elif name in stored:
            first = stored[name].spec.name
            problems.append(f"tensors {first} and {item.spec.name} both mean {name}; right: one of them")
        else:
            stored[name] = item
    raise_problems(str(path), problems)
    return stored, notes


def _read_sharded(path: Path) -> tuple[list[Stored], list[str]]:
    index = read_json(path / INDEX)
    weight_map = _weight_map(path, index)
    files = list(dict.fromkeys(weight_map.values()))
    found: list[Stored] = []
    problems: list[str] = []
    for file in files:
        try:
            found += read_header(path / file)
        except CheckpointError as error:  # gathered, so that one run names every damaged shard
            problems.append(str(error))
    raise_problems(str(path), problems)
    raise_problems(str(path / INDEX), _index_problems(index, weight_map, found))
    stray = sorted({file.name for file in path.glob("*.safetensors")} - set(files))
    notes = [f"file {name} is not in the index and is not used" for name in stray]
    if not _has_total(index):
        notes.append(f"{INDEX} has no metadata.total_size: the sum of tensor bytes was not compared")
    return found, notes


def _weight_map(path: Path, index: dict[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = "missing" if weight_map is None else f"a {type(weight_map).__name__} of no use"
        raise CheckpointError(f"{path / INDEX}: field weight_map is {found}; right: tensor name -> file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            right = "the name of a .safetensors file in the same folder"
            raise CheckpointError(f"{path / INDEX}: tensor {name} is mapped to {file!r}; right: {right}")
    return weight_map


def _has_total(index: dict[str, Any]) -> bool:
    return isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]


def _index_problems(index: dict[str, Any], weight_map: dict[str, str], found: list[Stored]) -> list[str]:
    places: dict[str, list[str]] = {}
    for item in found:
        places.setdefault(item.spec.name, []).append(item.file.name)
    problems = [
        f"tensor {name} is not in {file}, where the index puts it"
        + (f"; it is in {places[name][0]}" if name in places else "")
        for name, file in weight_map.items()
        if file not in places.get(name, [])
    ]
    for name, files in places.items():
        problems += [f"tensor {name} is in {f} and not in the index for it" for f in files if weight_map.get(name) != f]
    total = sum(item.spec.nbytes for item in found)
    if not problems and _has_total(index) and index["metadata"]["total_size"] != total:
        seen = index["metadata"]["total_size"]
        problems.append(f"field metadata.total_size is {seen}; right: {total}, the bytes of all tensors in the shards")
    return problems
