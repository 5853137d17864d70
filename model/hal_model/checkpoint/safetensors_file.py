"""The safetensors container, read and written without a tensor in memory.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data offsets) and the raw bytes.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal_model.config_fields import reject_duplicates
from hal_model.inventory import DTYPES, TensorSpec

_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file, the byte offset in it, and what it is under the name that the file uses."""

    file: Path
    offset: int
    spec: TensorSpec


def read_header(file: Path) -> list[Stored]:
    """Every tensor of ``file``, from its header alone; no data is read.

    Raises:
        CheckpointError: the file is missing, cut, too long, not safetensors, or holds a dtype this build does not know.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(len(_LFS))
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            stream.seek(8)
            text = stream.read(length) if length <= min(size, _MAX_HEADER) else b""
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; right: a shard that the index names") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); right: a readable safetensors file") from None
    if start == _LFS:
        raise CheckpointError(f"{file}: is a Git LFS pointer; right: the file that it points to")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(f"{file}: cut: the header should take {length} bytes, the file has {size} bytes in all")
    return _entries(file, _parse(file, text), 8 + length, size)


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=reject_duplicates)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header is not valid JSON ({error}); right: a safetensors file") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is a JSON {type(header).__name__}; right: an object")
    header.pop("__metadata__", None)
    return header


def _entries(file: Path, header: dict[str, Any], data_start: int, size: int) -> list[Stored]:
    found = sorted((_entry(file, name, fields) for name, fields in header.items()), key=lambda e: (e[1], e[2]))
    end = 0
    for spec, begin, stop in found:
        if begin != end:
            raise CheckpointError(f"{file}: tensor {spec.name} starts at byte {begin} of the data; right: {end}")
        end = stop
    if data_start + end != size:
        word = "cut" if data_start + end > size else "too long"
        raise CheckpointError(f"{file}: {word}: the header says {data_start + end} bytes, the file has {size}")
    return [Stored(file, data_start + begin, spec) for spec, begin, _ in found]


def _entry(file: Path, name: str, fields: Any) -> tuple[TensorSpec, int, int]:
    where = f"{file}: tensor {name}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointError(f"{where}: the header entry is {fields!r}; right: dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype} not known by this build; it knows {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {shape!r}, data_offsets {offsets!r}; right: lists of integers 0 or more")
    spec = TensorSpec(name, dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        right = f"{spec.nbytes} for {dtype} {list(shape)}"
        raise CheckpointError(f"{where}: data_offsets span {offsets[1] - offsets[0]} bytes; right: {right}")
    return spec, offsets[0], offsets[1]


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def map_file(file: Path) -> mmap.mmap:
    """A private mapping of ``file``: pages come in when touched, and a write never reaches the file."""
    try:
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be mapped ({error}); right: the file that was opened") from None


def view_tensor(mapping: mmap.mmap, stored: Stored) -> Tensor:
    """The tensor at ``stored`` as a view of ``mapping``; a copy only where its bytes are not aligned to its dtype."""
    spec = stored.spec
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    raw = torch.frombuffer(mapping, dtype=torch.uint8, count=spec.nbytes, offset=stored.offset)
    if stored.offset % spec.torch_dtype.itemsize:
        raw = raw.clone()
    return raw.view(spec.torch_dtype).view(spec.shape)


def header_bytes(specs: Iterable[TensorSpec]) -> bytes:
    """Length and JSON header of a file that holds ``specs`` in that order, padded so that the data starts 8-aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
