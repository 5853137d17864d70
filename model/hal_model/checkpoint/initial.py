"""Initial weights, produced piece by piece: random ones, and those behind the golden numbers (spec A.1, A.4).

Every element is a function of the tensor's name, its index and, for random weights, the seed; so a tensor is the same
whatever shard it lands in, and pieces of it can be made in any order.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hal_model.inventory import Parameter, TensorSpec

Initializer = Literal["random", "golden"]
Words = NDArray[np.uint32]
Codes = NDArray[np.uint8]

PIECE = 1 << 20  # elements at a time; a multiple of 32, so that pieces start on whole counter steps of the generator


@dataclass(frozen=True)
class Source:
    """Where bits come from: ``words(name, start, count)`` and ``codes(name, start, count)``, per element."""

    words: Callable[[str, int, int], Words]
    codes: Callable[[str, int, int], Codes]


def golden_words(name: str, start: int, count: int) -> Words:
    """The 32-bit hash of elements ``start … start + count`` of tensor ``name`` (spec A.1)."""
    h = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    h *= np.uint32(2654435761)
    h += np.uint32(zlib.crc32(name.encode()))
    h ^= h >> np.uint32(16)
    h *= np.uint32(2246822519)
    h ^= h >> np.uint32(13)
    h *= np.uint32(3266489917)
    h ^= h >> np.uint32(16)
    return h


def golden_codes(name: str, start: int, count: int) -> Codes:
    """The code byte of those elements (spec A.4)."""
    return (golden_words(name, start, count) >> np.uint32(8)).astype(np.uint8)


def golden_source() -> Source:
    """The weights of the golden numbers; they know no seed."""
    return Source(golden_words, golden_codes)


def random_source(seed: int) -> Source:
    """Weights from a counter-based generator keyed by seed and tensor name."""

    def raw(name: str, first_byte: int, size: int) -> Codes:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).advance(first_byte // 32)
        return np.asarray(bits.random_raw(-(-size // 8)), dtype="<u8").view(np.uint8)[:size]

    def words(name: str, start: int, count: int) -> Words:
        return raw(name, 4 * start, 4 * count).view("<u4")

    return Source(words, raw)


def pieces(parameter: Parameter, spec: TensorSpec, source: Source, experts: int) -> Iterator[bytes]:
    """The bytes of the stored tensor ``spec`` of ``parameter``, in order.

    Args:
        parameter: what the tensor is in the model; its shape [N, K] gives the spread of a linear.
        spec: what is stored (the weight or the scale of ``parameter``).
        source: where the bits come from.
        experts: routed experts of the model, for the expert table.
    """
    total = math.prod(spec.shape)
    for start in range(0, total, PIECE):
        count = min(PIECE, total - start)
        if parameter.kind == "table":
            yield _table(parameter, source, start, count, experts)
        elif spec.name == parameter.scale_name and parameter.kind in ("dense", "expert"):
            yield _scales(parameter, spec, source, start, count)
        elif spec.dtype in ("F8_E4M3", "I8"):
            yield _codes(spec, source, start, count)
        else:
            yield _floats(parameter, spec, source, start, count)


def _codes(spec: TensorSpec, source: Source, start: int, count: int) -> bytes:
    codes = source.codes(spec.name, start, count)
    if spec.dtype == "F8_E4M3":
        codes = codes - ((codes & 0x7F) == 0x7F).astype(np.uint8)  # the two NaN codes become the largest finite ones
    return codes.tobytes()


def _scales(parameter: Parameter, spec: TensorSpec, source: Source, start: int, count: int) -> bytes:
    """Powers of two that keep the output of a linear near the size of its input (spec A.4)."""
    packed = math.prod(spec.shape) * 32 == math.prod(parameter.shape)
    down = (2 if packed else 7) + math.ceil(math.log2(math.sqrt(parameter.shape[1])))
    return (np.uint8(127 - down) + (source.codes(spec.name, start, count) & np.uint8(1))).tobytes()


def _table(parameter: Parameter, source: Source, start: int, count: int, experts: int) -> bytes:
    """Expert numbers int64 [vocabulary, K]: the golden rule, with a random first expert per token otherwise."""
    width = parameter.shape[1]
    index = np.arange(start, start + count, dtype=np.int64)
    token, slot = index // width, index % width
    if source.words is golden_words:
        return ((7 * token + 3 * slot + 1) % experts).tobytes()
    first_token, tokens = int(token[0]), int(token[-1] - token[0]) + 1
    lead = first_token % 8  # a draw may only start on a whole counter step
    words = source.words(parameter.name, first_token - lead, lead + tokens)[lead:]
    return ((words[token - first_token] + slot) % experts).astype(np.int64).tobytes()


def _floats(parameter: Parameter, spec: TensorSpec, source: Source, start: int, count: int) -> bytes:
    spread, centre = distribution(parameter)
    unit = source.words(spec.name, start, count) / 2.0**32
    values = torch.from_numpy(((2.0 * unit - 1.0) * spread + centre).astype(np.float32))
    if parameter.kind != "float":
        values = values.bfloat16()  # the released dtype, even where the file is to hold F32
    return values.to(spec.torch_dtype).view(torch.uint8).numpy().tobytes()


def distribution(parameter: Parameter) -> tuple[float, float]:
    """(a, c) of the uniform law c ± a of an unquantised tensor (spec A.1)."""
    name, leaf = parameter.name, parameter.name.rpartition(".")[2]
    if leaf in ("ape", "attn_sink", "bias"):
        return {"ape": 0.5, "attn_sink": 1.0, "bias": 0.2}[leaf], 0.0
    if leaf.startswith("hc_") and not leaf.endswith("_fn"):
        return (0.1, 1.0) if leaf.endswith("_scale") else (0.5, 0.0)
    if name.endswith("norm.weight"):
        return 0.1, 1.0
    if name == "embed.weight":
        return 1.0, 0.0
    return math.sqrt(3.0 / parameter.shape[-1]), 0.0
