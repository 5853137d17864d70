"""A model ready to run: checkpoint, backend, memory, plan, opened together and checked in that order."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hal.arena import ArenaReport, WeightArena, WorkspaceArena, check_fits
from hal.device import DeviceServices
from hal.errors import MemoryLimitError, UsageError
from hal.plan import Plan, bind, load
from hal.plugins import Backend, Choice
from hal.plugins import load as load_plugins
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS, ModelConfig
from hal_model.load import Inventory, Source, Wanted, load_weights, meta_weights, weight_bytes
from hal_model.model import Model, Numerics, Traceable
from hal_model.settings import Settings
from hal_model.state import Limits, State, state_bytes
from hal_model.tokenizer import Tokenizer, write_byte_tokenizer
from hal_model.weights import Weights

Progress = Callable[[int, int, str], None]
TINY = "tiny-chat"


@dataclass(frozen=True)
class Session:
    """Everything that a run needs. ``notes`` are one-line facts that the user should see."""

    settings: Settings
    choice: Choice
    services: DeviceServices
    config: ModelConfig
    tokenizer: Tokenizer
    model: Model
    state: State
    weights: WeightArena
    workspace: WorkspaceArena
    plan: Plan
    notes: tuple[str, ...]

    def arenas(self) -> tuple[ArenaReport, ...]:
        """Use and peak of the three arenas."""
        return self.weights.report(), self.state.arena.report(), self.workspace.report()


def tiny_checkpoint(progress: Progress | None = None) -> Path:
    """The tiny random checkpoint of the demo, written on first use into the user's cache folder, whole or not at all.

    Raises:
        UsageError: the folder cannot be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hal"
    path = root / f"{TINY}-1"
    if path.exists():
        return path
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{TINY}-", dir=root) as folder:
            made = Path(folder) / TINY
            init_checkpoint(PRESETS[TINY], made, progress=progress)
            write_byte_tokenizer(made, PRESETS[TINY].vocab_size)
            made.rename(path)
    except OSError as e:
        if path.exists():  # another process was faster
            return path
        raise UsageError(
            f"{root}: {e}; set XDG_CACHE_HOME to a folder that can be written, or give a checkpoint"
        ) from e
    return path


def limits_of(settings: Settings, config: ModelConfig) -> Limits:
    """Limits from the settings, held against the model's context.

    Raises:
        UsageError: ``max_seq_len`` is longer than the model's context.
    """
    if settings.max_seq_len > config.max_position_embeddings:
        right = config.max_position_embeddings
        raise UsageError(f"max_seq_len = {settings.max_seq_len}, right is at most the model's context of {right}")
    # a decode step has one token of every sequence, however short prefill chunks are
    return Limits(settings.max_batch_size, settings.max_seq_len, max(settings.max_step_tokens, settings.max_batch_size))


def choose_backend(settings: Settings) -> Choice:
    """The backend of ``--backend``, ``HAL_BACKEND`` or the best probed device."""
    return load_plugins().choose(settings.backend)


@contextlib.contextmanager
def device_variables(settings: Settings) -> Iterator[None]:
    """Threads and affinity as the variables that a device reads when it is opened; restored afterwards."""
    wanted = {"HAL_CPU_THREADS": settings.threads, "HAL_CPU_AFFINITY": settings.affinity}
    given = {name: str(value) for name, value in wanted.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def arch_of(choice: Choice) -> str:
    """Architecture of the chosen device, as probed."""
    assert choice.backend.probe is not None
    return next(d.arch for d in choice.backend.probe.devices if d.index == choice.device)


def wanted_formats(settings: Settings, backend: Backend, arch: str) -> tuple[Wanted, ...]:
    """Ways to hold the weights, best first: what the backend prefers, at last exactly as stored."""
    carrier = getattr(torch, settings.dtype)
    stored = Wanted(carrier)
    if settings.weight_format == "stored":
        return (stored,)
    if settings.weight_format != "auto":
        return (replace(stored, formats=dict.fromkeys(("fp8", "fp4"), settings.weight_format)),)
    return _preferred(stored, backend.weight_formats(arch))


def _preferred(stored: Wanted, formats: Mapping[str, tuple[str, ...]]) -> tuple[Wanted, ...]:
    dtype = {key: getattr(torch, formats[key][0]) for key in ("wide", "dense_dtype") if formats.get(key)}
    dense = dtype.get("dense_dtype") if stored.carrier == torch.bfloat16 else None
    best = {f: formats[f][0] for f in ("fp8", "fp4") if formats.get(f)}
    first = replace(stored, formats=best, wide=dtype.get("wide"), dense=dense)
    return (first, stored) if first != stored else (stored,)


def _fit(
    wanted: tuple[Wanted, ...], config: ModelConfig, source: Source, limits: Limits, settings: Settings, free: int
) -> tuple[Wanted, int, tuple[str, ...]]:
    """The first way of holding the weights that fits beside the state, its bytes, and a note if it is not the first."""
    notes: list[str] = []
    state = state_bytes(config, limits, getattr(torch, settings.dtype))
    for i, want in enumerate(wanted):
        weights = weight_bytes(meta_weights(config, source, want)[1])
        try:
            check_fits({"weights": weights, "state": state}, free, settings.memory_share)
        except MemoryLimitError as e:
            if i + 1 == len(wanted):
                raise _with_room(e, config, limits, settings, free, weights) from e
            notes.append(f"weights are kept as stored, which is slower: converted they need {weights} bytes")
        else:
            return want, weights, tuple(notes)
    raise AssertionError("no way of holding weights was offered")


def _with_room(
    e: MemoryLimitError, config: ModelConfig, limits: Limits, settings: Settings, free: int, weights: int
) -> MemoryLimitError:
    """``e`` with the longest ``max_seq_len`` that would fit."""
    room, fits = int(free * settings.memory_share) - weights, 0
    step = limits.max_seq_len // 2
    while step:
        tried = replace(limits, max_seq_len=fits + step)
        if state_bytes(config, tried, getattr(torch, settings.dtype)) <= room:
            fits += step
        else:
            step //= 2
    too_large = f"the weights need {weights} bytes" + (" alone" if room < 0 else "; lower max_batch_size")
    advice = f"max_seq_len {fits} would fit" if fits else f"no max_seq_len fits: {too_large}"
    return MemoryLimitError(f"{e} ({advice})")


def open_session(settings: Settings, progress: Progress | None = None) -> Session:
    """Open a checkpoint on a backend.

    Raises:
        HalError: whatever is wrong, named: settings, config, tensors, backend, memory or plan.
    """
    notes: list[str] = []
    path = settings.model
    if path is None:
        path = tiny_checkpoint(progress)
        notes.append(f"no checkpoint given: using a tiny one with random weights, {path}")
    config, checkpoint = ModelConfig.from_dir(path), Checkpoint.open(path)
    limits = limits_of(settings, config)
    report = checkpoint.verify(config)
    notes += [*config.notes, *report.notes, *(f"not used yet: {stage}" for stage in report.unused)]
    tokenizer, pinned = Tokenizer.load(path), load(settings.plan) if settings.plan else None
    choice = choose_backend(settings)
    arch = arch_of(choice)
    with device_variables(settings):
        services = choice.backend.device(choice.device)
    notes += choice.skipped
    ways = wanted_formats(settings, choice.backend, arch)
    want, _, about = _fit(ways, config, checkpoint, limits, settings, services.free_bytes())
    notes += about
    if settings.check_values:
        checkpoint.check_values(config, progress=progress)
    weights, arena = _load(settings, config, checkpoint, want, services, progress)
    carrier = getattr(torch, settings.dtype)
    model = Model.build(config, weights, Numerics(carrier, settings.quantised_state), services.device)
    state = State(config, limits, carrier, services)
    plan = bind_model(settings, model, limits, state, choice, arch, pinned)
    return Session(
        settings, choice, services, config, tokenizer, model, state, arena, WorkspaceArena(services), plan, tuple(notes)
    )


def _load(
    settings: Settings,
    config: ModelConfig,
    checkpoint: Checkpoint,
    want: Wanted,
    services: DeviceServices,
    progress: Progress | None,
) -> tuple[Weights, WeightArena]:
    cache = settings.weight_cache
    try:
        return load_weights(config, checkpoint, want, services, cache=cache, progress=progress)
    except OSError as e:
        if cache is None:
            raise
        raise UsageError(f"--weight-cache {cache}: {e}; right is a folder on a writable disk with room") from e


def bind_model(
    settings: Settings,
    model: Model,
    limits: Limits,
    state: State,
    choice: Choice,
    arch: str,
    pinned: Mapping[str, Any] | None = None,
) -> Plan:
    """Resolve every operator of ``model`` on the chosen backend."""
    return bind(
        Traceable.of(model, limits, state),
        choice.backend.name,
        choice.backend.kernels(),
        arch,
        strict=settings.strict,
        fallback_budget=settings.fallback_budget,
        pinned=pinned,
    )


class MetaServices:
    """A device without memory: sizes a model of any geometry on any machine."""

    device = torch.device("meta")

    def free_bytes(self) -> int:
        """No bound."""
        return 2**62

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes that exist on paper only."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def plan_only(settings: Settings, config: ModelConfig, pinned: Mapping[str, Any] | None = None) -> tuple[Choice, Plan]:
    """The plan of ``config`` on a backend without loading a weight: any geometry, on any machine."""
    choice = choose_backend(settings)
    arch, limits = arch_of(choice), limits_of(settings, config)
    source: Source = Checkpoint.open(settings.model) if settings.model else Inventory(config)
    want = wanted_formats(settings, choice.backend, arch)[0]
    weights, _ = meta_weights(config, source, want)
    carrier = getattr(torch, settings.dtype)
    services: Any = MetaServices()
    model = Model.build(config, weights, Numerics(carrier, settings.quantised_state), torch.device("meta"))
    state = State(config, limits, carrier, services)
    return choice, bind_model(settings, model, limits, state, choice, arch, pinned)
