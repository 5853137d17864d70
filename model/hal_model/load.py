"""From a checkpoint to weights in the arena, in the formats that a backend wants.

The structure is walked twice by the same code: once to learn names, shapes and bytes (all tensors on the meta device),
then, with one flat buffer reserved, to fill them in place. A converted buffer can be kept on disk and is read back whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hal.arena import WeightArena, footprint
from hal.device import DeviceServices
from hal.errors import CheckpointError, InputError
from hal_model.checkpoint import Checkpoint
from hal_model.config import ModelConfig
from hal_model.inventory import TensorSpec, tensors
from hal_model.weights import Attention, Compressor, Head, Indexer, Layer, Moe, Mtp, Site, Weights
from hal_ops import Weight, formats

Fill = Callable[[Tensor], None]
Progress = Callable[[int, int, str], None]
FORMAT_OF = {"F8_E4M3": "fp8", "I8": "fp4"}


class Source(Protocol):
    """Stored tensors by name: a checkpoint, or the inventory of a config."""

    def spec(self, name: str) -> TensorSpec:
        """Stored dtype and shape."""

    def load(self, name: str) -> Tensor:
        """The stored tensor."""

    def __contains__(self, name: object) -> bool: ...


class Inventory:
    """The tensors that a config says a checkpoint holds, without values: enough to plan."""

    def __init__(self, config: ModelConfig) -> None:
        self._specs = {t.name: t for t in tensors(config)}

    def spec(self, name: str) -> TensorSpec:
        """See :class:`Source`."""
        return self._specs[name]

    def load(self, name: str) -> Tensor:
        """Refuse: an inventory has no values."""
        raise CheckpointError(f"{name}: an inventory has no values; right is a checkpoint")

    def __contains__(self, name: object) -> bool:
        return name in self._specs


@dataclass(frozen=True)
class Wanted:
    """How weights are held: the carrier, the format for each stored format, and the dtype of float32-product operands.

    ``formats`` maps ``fp8`` and ``fp4`` to ``fp8``, ``fnuz``, ``fp4``, ``int8`` or ``dense``. ``wide`` None keeps those
    operands as stored; ``dense`` None holds dense weights in the carrier.
    """

    carrier: torch.dtype = torch.bfloat16
    formats: Mapping[str, str] = field(default_factory=dict)
    wide: torch.dtype | None = None
    dense: torch.dtype | None = None

    @property
    def dense_dtype(self) -> torch.dtype:
        """Dtype of dense weights: the carrier unless the backend multiplies better in another."""
        return self.dense or self.carrier

    def of(self, stored: str) -> str:
        """The format in which a weight stored as ``stored`` is held."""
        return self.formats.get(stored, stored)

    def key(self) -> str:
        """Stable text of everything that decides the converted bytes."""
        return json.dumps([str(self.carrier), sorted(self.formats.items()), str(self.wide), str(self.dense)])


@dataclass
class _Placer:
    """``put`` gives a weight its place; what it does with it differs between the two walks."""

    put: Callable[[str, tuple[int, ...], torch.dtype, Fill], Tensor]
    source: Source
    want: Wanted
    config: ModelConfig

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that is only cast; the stored dtype where ``dtype`` is None."""
        spec = self.source.spec(name)
        return self.put(name, spec.shape, dtype or spec.torch_dtype, lambda out: _copy(out, self.source.load(name)))

    def wide(self, name: str) -> Tensor:
        """An operand of a float32 product."""
        spec = self.source.spec(name)
        return self.plain(name, self.want.wide or spec.torch_dtype)

    def linear(self, *names: str) -> Weight:
        """One linear, or several of equal input stacked along the output axis."""
        return self._stack([names], ())

    def experts(self, names: list[tuple[str, ...]]) -> Weight:
        """Stacked linears of every expert [E, N, K]."""
        return self._stack(names, (len(names),))

    def _stack(self, names: list[tuple[str, ...]], lead: tuple[int, ...]) -> Weight:
        first = self.source.spec(f"{names[0][0]}.weight")
        stored = FORMAT_OF.get(first.dtype, "dense")
        held = self.want.of(stored)
        count = sum(map(len, names))
        label = f"{names[0][0]}.weight" + (f" and {count - 1} more" if count > 1 else "")
        parts = [[_held_shapes(self.source, n, stored, held) for n in group] for group in names]
        data = self._place(label, names, lead, [[p[0] for p in g] for g in parts], held, 0)
        scale = None
        if held != "dense":
            scale = self._place(f"{label}.scale", names, lead, [[p[1] for p in g] for g in parts], held, 1)
        kind: Any = "fp8" if held == "fnuz" else held
        return Weight(data, scale, kind, stored != "dense")

    def _place(
        self,
        label: str,
        names: list[tuple[str, ...]],
        lead: tuple[int, ...],
        shapes: list[list[Any]],
        held: str,
        which: int,
    ) -> Tensor:
        rows = sum(s[0] for s in shapes[0])
        shape = (*lead, rows, *shapes[0][0][1:])

        def fill(out: Tensor) -> None:
            flat = out if lead else out[None]
            for e, group in enumerate(names):
                at = 0
                for name, part in zip(group, shapes[e], strict=True):
                    values = convert(self.source, name, held, self.want.dense_dtype)[which]
                    assert values is not None
                    _copy(flat[e, at : at + part[0]], values)
                    at += part[0]

        return self.put(label, shape, _held_dtype(self.source, names[0][0], held, self.want.dense_dtype, which), fill)

    def compressor(self, p: str) -> Compressor:
        """``p`` ends in a dot, here and below."""
        return Compressor(
            self.wide(f"{p}wkv.weight"),
            self.wide(f"{p}wgate.weight"),
            self.plain(f"{p}ape", torch.float32),
            self.plain(f"{p}norm.weight", torch.float32),
        )

    def site(self, p: str, name: str) -> Site:
        """Mixing parameters and norm of the attention or expert site."""
        fn, scale, base = (self.plain(f"{p}hc_{name}_{part}", torch.float32) for part in ("fn", "scale", "base"))
        return Site(fn, scale, base, self.plain(f"{p}{name}_norm.weight", torch.float32))

    def attention(self, p: str, ratio: int) -> Attention:
        """One attention; ratio 4 has an indexer."""
        c = self.config
        indexer = None
        if ratio == 4:
            ix = f"{p}indexer."
            project = self.plain(f"{ix}weights_proj.weight", self.want.dense_dtype)
            indexer = Indexer(self.linear(f"{ix}wq_b"), project, self.compressor(f"{ix}compressor."))
        group = (c.o_groups, c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
        wo_a = self.put(f"{p}wo_a.weight", group, self.want.dense_dtype, lambda out: self._fill_dense(out, f"{p}wo_a"))
        return Attention(
            self.linear(f"{p}wq_a"),
            self.plain(f"{p}q_norm.weight", torch.float32),
            self.linear(f"{p}wq_b"),
            self.linear(f"{p}wkv"),
            self.plain(f"{p}kv_norm.weight", torch.float32),
            wo_a,
            self.linear(f"{p}wo_b"),
            self.plain(f"{p}attn_sink", torch.float32),
            self.compressor(f"{p}compressor.") if ratio else None,
            indexer,
        )

    def _fill_dense(self, out: Tensor, name: str) -> None:
        values = convert(self.source, name, "dense", self.want.dense_dtype)[0]
        assert values is not None
        _copy(out, values.view(out.shape))

    def moe(self, p: str, hashed: bool) -> Moe:
        """Router, routed and shared experts."""
        ids = range(self.config.n_routed_experts)
        return Moe(
            self.wide(f"{p}gate.weight"),
            None if hashed else self.plain(f"{p}gate.bias", torch.float32),
            self.plain(f"{p}gate.tid2eid", torch.int32) if hashed else None,
            self.experts([(f"{p}experts.{e}.w1", f"{p}experts.{e}.w3") for e in ids]),
            self.experts([(f"{p}experts.{e}.w2",) for e in ids]),
            self.linear(f"{p}shared_experts.w1", f"{p}shared_experts.w3"),
            self.linear(f"{p}shared_experts.w2"),
        )

    def layer(self, p: str, ratio: int, hashed: bool) -> Layer:
        """One block."""
        return Layer(
            self.site(p, "attn"), self.attention(f"{p}attn.", ratio), self.site(p, "ffn"), self.moe(f"{p}ffn.", hashed)
        )

    def head(self, p: str) -> Head:
        """Collapse parameters and final norm."""
        fn, scale, base = (self.plain(f"{p}hc_head_{part}", torch.float32) for part in ("fn", "scale", "base"))
        return Head(fn, scale, base, self.plain(f"{p}norm.weight", torch.float32))

    def mtp(self) -> Mtp | None:
        """The draft block of the preview releases; DSpark stages are not used yet."""
        if self.config.dspark is not None or "mtp.0.e_proj.weight" not in self.source:
            return None
        p = "mtp.0."
        e, h = self.linear(f"{p}e_proj"), self.linear(f"{p}h_proj")
        enorm, hnorm = (self.plain(f"{p}{n}.weight", torch.float32) for n in ("enorm", "hnorm"))
        return Mtp(e, h, enorm, hnorm, self.layer(p, 0, False), self.head(p))

    def weights(self) -> Weights:
        """Everything, in the order of the checkpoint."""
        c = self.config
        ratios = enumerate(c.compress_ratios)
        return Weights(
            self.plain("embed.weight", self.want.carrier),
            tuple(self.layer(f"layers.{i}.", r, i < c.num_hash_layers) for i, r in ratios),
            self.head(""),
            self.wide("head.weight"),
            self.mtp(),
        )


def _copy(out: Tensor, values: Tensor) -> None:
    if out.dtype.itemsize == 1 and out.dtype == values.dtype:
        out.view(torch.uint8).copy_(values.contiguous().view(torch.uint8))  # 8-bit floats have no copy on some devices
    else:
        out.copy_(values)


def _held_shapes(source: Source, name: str, stored: str, held: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of codes and scales of the linear ``name`` in format ``held``."""
    n, k = source.spec(f"{name}.weight").shape
    k = 2 * k if stored == "fp4" else k
    if held == "dense":
        return (n, k), None
    if held == "int8":
        return (n, k), (n,)
    if held == "fp4":
        return (n, k // 2), (n, k // 32)
    return (n, k), (-(-n // 128), -(-k // 128))


def _held_dtype(source: Source, name: str, held: str, carrier: torch.dtype, which: int) -> torch.dtype:
    codes = {"dense": carrier, "int8": torch.int8, "fp4": torch.int8, "fp8": torch.float8_e4m3fn}
    if which == 0:
        return codes.get(held, torch.float8_e4m3fnuz)
    stored = FORMAT_OF.get(source.spec(f"{name}.weight").dtype)
    if stored == held or (stored, held) == ("fp8", "fnuz"):  # F32 scales of the Base releases need not be powers of two
        return source.spec(f"{name}.scale").torch_dtype
    return torch.float32 if held == "int8" else torch.float8_e8m0fnu


def convert(source: Source, name: str, held: str, carrier: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of the linear ``name`` converted from its stored format to ``held``.

    FP8 and FP4 to dense, FP4 to FP8 and FN to FNUZ keep every value; INT8 rounds per output row.

    Raises:
        CheckpointError: the conversion does not exist, or would lose values of this tensor, which is named.
    """
    try:
        return _convert(source, name, held, carrier)
    except InputError as e:
        raise CheckpointError(f"tensor {name}.weight: {e}") from e


def _convert(source: Source, name: str, held: str, carrier: torch.dtype) -> tuple[Tensor, Tensor | None]:
    spec = source.spec(f"{name}.weight")
    stored, codes = FORMAT_OF.get(spec.dtype, "dense"), source.load(f"{name}.weight")
    if stored == "dense":
        return (codes.to(carrier), None) if held == "dense" else _as_int8(codes, name, held)
    scale = source.load(f"{name}.scale")
    if held == stored:
        return codes, scale
    if stored == "fp4" and held in ("fp8", "fnuz"):
        codes, scale = formats.fp4_to_fp8_weight(codes, scale)
    if held == "fp8" and stored == "fp4":
        return codes, scale
    if held == "fnuz":
        return formats.fn_to_fnuz(codes, scale)
    decode = formats.dequantize_weight_fp4 if stored == "fp4" else formats.dequantize_weight_fp8
    values = decode(codes, scale)
    return (values.to(carrier), None) if held == "dense" else _as_int8(values, name, held)


def _as_int8(values: Tensor, name: str, held: str) -> tuple[Tensor, Tensor]:
    """INT8 codes [N, K] and scales float32 [N] of decoded values.

    Raises:
        CheckpointError: ``held`` is another format, into which decoded values are not converted.
    """
    if held != "int8":
        raise CheckpointError(
            f"tensor {name}.weight: no conversion to {held}; right is dense, int8 or the stored format"
        )
    codes, scale = formats.quantize_int8(values)
    return codes, scale[..., 0]


def meta_weights(config: ModelConfig, source: Source, want: Wanted) -> tuple[Weights, list[tuple[str, Tensor]]]:
    """The weights on the meta device, and every placed tensor by name: what planning and sizing need."""
    placed: list[tuple[str, Tensor]] = []

    def put(name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> Tensor:  # noqa: ARG001
        placed.append((name, torch.empty(shape, dtype=dtype, device="meta")))
        return placed[-1][1]

    return _Placer(put, source, want, config).weights(), placed


def weight_bytes(placed: list[tuple[str, Tensor]]) -> int:
    """Bytes of the weight arena for ``placed``."""
    return footprint((t.shape, t.dtype) for _, t in placed)


def load_weights(
    config: ModelConfig,
    source: Checkpoint,
    want: Wanted,
    services: DeviceServices,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Weights, WeightArena]:
    """Load every weight into one arena.

    Args:
        cache: folder for converted weights; a matching entry is read instead of converting, a new one is written.
        progress: called with bytes done, bytes in all and the tensor's name.

    Raises:
        CheckpointError: a tensor is missing or damaged, or the cached file is (its digest is checked).
        MemoryLimitError: the device cannot hold them.
    """
    _, placed = meta_weights(config, source, want)
    total = weight_bytes(placed)
    entry = _cache_entry(cache, source, want) if cache else None
    hit = entry is not None and entry.with_suffix(".json").exists()
    arena, done = WeightArena(services, total), 0

    def put(name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> Tensor:
        nonlocal done
        out = arena.place(name, shape, dtype)
        if not hit:
            fill(out)
        done += out.nbytes
        if progress:
            progress(done, total, name)
        return out

    weights = _Placer(put, source, want, config).weights()
    arena.seal()
    if entry is not None:
        buffer = list_buffers(weights)
        (_read_cache if hit else _write_cache)(entry, buffer)
    return weights, arena


def list_buffers(weights: Any) -> list[Tensor]:
    """Every tensor of a weights tree as bytes, in field order."""
    if isinstance(weights, Tensor):
        return [weights.reshape(-1).view(torch.uint8)]
    if isinstance(weights, tuple):
        return [t for w in weights for t in list_buffers(w)]
    if is_dataclass(weights):
        return [t for f in fields(weights) for t in list_buffers(getattr(weights, f.name))]
    return []


def _cache_entry(cache: Path, source: Checkpoint, want: Wanted) -> Path:
    """Path (without suffix) for this checkpoint and these formats: names, sizes and times of its files, and the formats."""
    files = sorted(source.path.glob("*.safetensors")) if source.path.is_dir() else [source.path]
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return cache / hashlib.sha256(json.dumps([facts, want.key()]).encode()).hexdigest()[:32]


def _write_cache(entry: Path, buffers: list[Tensor]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = entry.with_suffix(f".partial-{os.getpid()}"), hashlib.sha256()
    try:
        with partial.open("wb") as out:
            for t in buffers:
                data = t.cpu().numpy().tobytes()
                digest.update(data)
                out.write(data)
        partial.replace(entry.with_suffix(".bin"))
    finally:
        partial.unlink(missing_ok=True)
    manifest = {"sha256": digest.hexdigest(), "bytes": sum(t.numel() for t in buffers)}
    note = entry.with_suffix(f".note-{os.getpid()}")
    note.write_text(json.dumps(manifest) + "\n")
    note.replace(entry.with_suffix(".json"))


def _manifest_digest(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"weight cache {file}: holds no digest ({e!r}); delete it and its .bin") from e


def _read_cache(entry: Path, buffers: list[Tensor]) -> None:
    file, right = entry.with_suffix(".bin"), _manifest_digest(entry.with_suffix(".json"))
    total, digest = sum(t.numel() for t in buffers), hashlib.sha256()
    size = file.stat().st_size if file.exists() else 0
    if size != total:
        raise CheckpointError(f"weight cache {file}: {size} bytes, right is {total}; delete it and its .json")
    with file.open("rb") as stream:
        for t in buffers:
            part = bytearray(stream.read(t.numel()))
            digest.update(part)
            if part:
                t.copy_(torch.frombuffer(part, dtype=torch.uint8))
    if digest.hexdigest() != right:
        raise CheckpointError(f"weight cache {file}: content does not match its digest; delete it and its .json")
