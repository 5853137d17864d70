"""Whether a checkpoint holds exactly the tensors of a configuration, judged from headers alone (faults B64, K18)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hal_model.config import ModelConfig
from hal_model.config_fields import raise_problems
from hal_model.inventory import Parameter, TensorSpec, parameters, quantised

if TYPE_CHECKING:
    from hal_model.checkpoint.reader import Checkpoint

FLOATS = ("BF16", "F16", "F32")
SCALES = ("F8_E8M0", "F32")
_FORMATS = {"F8_E4M3": "fp8", "I8": "fp4"}


@dataclass(frozen=True)
class Report:
    """What a verified checkpoint holds.

    ``experts``, ``dense`` and ``scales`` list the storage formats found (``("fp4",)``); ``draft`` is ``none`` (the
    model has no draft), ``absent`` (the files have none), ``mtp`` or ``dspark``; ``unused`` lists stages that are
    recognised and not used by this build.
    """

    path: Path
    tensors: int
    nbytes: int
    experts: tuple[str, ...]
    dense: tuple[str, ...]
    scales: tuple[str, ...]
    draft: str
    unused: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class _Survey:
    """What has been seen so far, and what was wrong."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    formats: dict[str, set[str]] = field(default_factory=lambda: {"expert": set(), "dense": set(), "scale": set()})


def verify(checkpoint: Checkpoint, config: ModelConfig) -> Report:
    """Compare every tensor of ``checkpoint`` with ``config``: presence, shape, dtype, and scale against its weight.

    The format of a linear is decided by its own dtype: ``F8_E4M3`` with a scale per 128 x 128 block, ``I8`` (packed
    FP4, routed experts only) with a scale per row and 32 columns, or a plain float without a scale.

    Raises:
        CheckpointError: naming every missing, unexpected, mis-shaped or wrongly typed tensor (ten, then a count).
    """
    survey = _Survey(notes=[*config.notes, *checkpoint.notes])
    has_draft = any(name.startswith("mtp.") for name in checkpoint.names)
    for parameter in parameters(config, draft=has_draft):
        if parameter.kind in ("dense", "expert"):
            _check_linear(checkpoint, parameter, survey)
        else:
            _check_plain(checkpoint, parameter, survey)
    for name in checkpoint.names:
        if name not in survey.used:
            spec = checkpoint.spec(name)
            survey.problems.append(f"tensor {name} ({_show(spec)}) is unexpected; right: no such tensor in this model")
    raise_problems(str(checkpoint.path), survey.problems)
    return _report(checkpoint, config, survey, has_draft)


def _show(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _find(checkpoint: Checkpoint, survey: _Survey, name: str, right: str) -> TensorSpec | None:
    survey.used.add(name)
    if name in checkpoint:
        return checkpoint.spec(name)
    survey.problems.append(f"tensor {name} is missing; right: {right}")
    return None


def _check_shape(checkpoint: Checkpoint, survey: _Survey, spec: TensorSpec, right: TensorSpec, hint: str = "") -> None:
    if spec.shape != right.shape:
        where = checkpoint.stored(spec.name).file.name
        found = f"tensor {spec.name} in {where} is {_show(spec)}"
        survey.problems.append(f"{found}; right: shape {list(right.shape)}{hint}")


def _check_dtype(checkpoint: Checkpoint, survey: _Survey, spec: TensorSpec, allowed: tuple[str, ...]) -> bool:
    if spec.dtype in allowed:
        return True
    where = checkpoint.stored(spec.name).file.name
    survey.problems.append(f"tensor {spec.name} in {where} is {_show(spec)}; right: dtype {' or '.join(allowed)}")
    return False


def _check_linear(checkpoint: Checkpoint, parameter: Parameter, survey: _Survey) -> None:
    quantised_dtypes = ("F8_E4M3", "I8") if parameter.kind == "expert" else ("F8_E4M3",)
    spec = _find(checkpoint, survey, parameter.name, f"{quantised_dtypes[0]} {list(parameter.shape)} or another format")
    if spec is None or not _check_dtype(checkpoint, survey, spec, quantised_dtypes + FLOATS):
        survey.used.add(parameter.scale_name)
        return
    fmt = _FORMATS.get(spec.dtype)
    survey.formats[parameter.kind].add(fmt or spec.dtype.lower())
    if fmt is None:
        _check_shape(checkpoint, survey, spec, TensorSpec(parameter.name, spec.dtype, parameter.shape))
        return  # a scale beside a plain weight stays unused and is named as unexpected
    weight, scale = quantised(parameter, fmt)
    hint = f" for {fmt.upper()} codes of {list(parameter.shape)}" + (", two per byte" if fmt == "fp4" else "")
    _check_shape(checkpoint, survey, spec, weight, hint)
    found = _find(checkpoint, survey, scale.name, f"F8_E8M0 or F32 {list(scale.shape)} beside {parameter.name}")
    if found is not None and _check_dtype(checkpoint, survey, found, SCALES):
        survey.formats["scale"].add(found.dtype)
        blocks = "128 x 128 block" if fmt == "fp8" else "row and 32 columns"
        _check_shape(checkpoint, survey, found, scale, f", one scale per {blocks} of {fmt.upper()} {parameter.name}")


def _check_plain(checkpoint: Checkpoint, parameter: Parameter, survey: _Survey) -> None:
    allowed = ("I64", "I32") if parameter.kind == "table" else FLOATS
    official = {"table": "I64", "float": "F32", "carrier": "BF16"}[parameter.kind]
    spec = _find(checkpoint, survey, parameter.name, f"{official} {list(parameter.shape)}")
    if spec is None or not _check_dtype(checkpoint, survey, spec, allowed):
        return
    _check_shape(checkpoint, survey, spec, TensorSpec(parameter.name, official, parameter.shape))
    if parameter.kind == "float" and spec.dtype != official:
        survey.notes.append(f"tensor {spec.name} is stored as {spec.dtype}; the releases store {official}")


def _report(checkpoint: Checkpoint, config: ModelConfig, survey: _Survey, has_draft: bool) -> Report:
    formats = {kind: tuple(sorted(found)) for kind, found in survey.formats.items()}
    draft, unused = _draft(config, has_draft)
    notes = list(survey.notes)
    if draft == "absent":
        notes.append("the draft stages (mtp.*) are not in the files: no speculative decoding")
    if unused:
        notes.append(f"DSpark stages {', '.join(unused)} are recognised and not used by this build")
    notes += _expert_notes(config, formats["expert"])
    return Report(
        path=checkpoint.path,
        tensors=len(checkpoint.names),
        nbytes=checkpoint.nbytes,
        experts=formats["expert"],
        dense=formats["dense"],
        scales=formats["scale"],
        draft=draft,
        unused=unused,
        notes=tuple(notes),
    )


def _draft(config: ModelConfig, has_draft: bool) -> tuple[str, tuple[str, ...]]:
    if not config.draft_stages:
        return "none", ()
    if not has_draft:
        return "absent", ()
    if config.dspark is None:
        return "mtp", ()
    return "dspark", tuple(f"mtp.{stage}" for stage in range(config.draft_stages))


def _expert_notes(config: ModelConfig, found: tuple[str, ...]) -> Iterator[str]:
    if config.expert_dtype is not None and found != (config.expert_dtype,):
        yield f"expert_dtype says {config.expert_dtype}, the tensors are {', '.join(found)}: the tensors decide"
