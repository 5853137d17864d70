"""Everything a user can set, from flags or a YAML file, checked before anything is loaded."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from hal.errors import UsageError

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p: (0, 1]. min_p: [0, 1). seed: of the first sequence, the next ones count
    up from it. Penalties: repetition 1, presence 0 and frequency 0 are none. stop: texts that end generation, not shown.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or above, finite")
        _within("top_k", self.top_k, 0 <= self.top_k < 2**31, "from 0 (all) to below 2^31")
        _within("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _within("min_p", self.min_p, 0 <= self.min_p < 1, "from 0 to below 1")
        _within("seed", self.seed, 0 <= self.seed < 2**62, "from 0 to below 2^62")
        repetition = self.repetition_penalty
        _within("repetition_penalty", repetition, 0.01 <= repetition <= 100, "from 0.01 to 100 (1 is none)")
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "from -2 to 2")
        _within("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or above")
        _within("stop", self.stop, all(self.stop), "texts that are not empty")

    @property
    def penalised(self) -> bool:
        """Whether any penalty is on."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Settings:
    """Where the model comes from, where it runs, and within what limits.

    model: checkpoint folder, None for the built-in tiny one. dtype: carrier. quantised_state: False runs the structural model.
    max_step_tokens: longest prefill chunk. memory_share: part of the free memory that may be used. fallback_budget: most
    operators on references, None for no bound.
    """

    model: Path | None = None
    backend: str = "auto"
    dtype: str = "bfloat16"
    quantised_state: bool = True
    weight_format: str = "auto"
    max_seq_len: int = 4096
    max_batch_size: int = 4
    max_step_tokens: int = 512
    memory_share: float = 0.9
    threads: int | None = None
    affinity: str | None = None
    weight_cache: Path | None = None
    strict: bool = False
    fallback_budget: int | None = None
    plan: Path | None = None
    check_values: bool = False
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        _within("dtype", self.dtype, self.dtype in DTYPES, " or ".join(DTYPES))
        _within("weight_format", self.weight_format, self.weight_format in WEIGHT_FORMATS, ", ".join(WEIGHT_FORMATS))
        _within("max_seq_len", self.max_seq_len, self.max_seq_len >= 1, "1 or above")
        for name, most in (("max_batch_size", 2**16), ("max_step_tokens", 2**20)):
            _within(name, getattr(self, name), 1 <= getattr(self, name) <= most, f"from 1 to {most}")
        _within("memory_share", self.memory_share, 0 < self.memory_share <= 1, "above 0 and at most 1")
        if self.threads is not None:
            _within("threads", self.threads, self.threads >= 1, "1 or above")
        if self.fallback_budget is not None:
            _within("fallback_budget", self.fallback_budget, self.fallback_budget >= 0, "0 or above")


WEIGHT_FORMATS = ("auto", "stored", "dense", "int8")


def _within(name: str, value: Any, right: bool, text: str) -> None:
    if not right:
        raise UsageError(f"{name} = {value!r}, right is {text}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings from a YAML file, by name; sampling settings under ``sampling``.

    Raises:
        UsageError: the file cannot be read, holds an unknown key (with a suggestion), or a value of a wrong type.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UsageError(f"--config {path}: {' '.join(str(e).split())}") from e
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"--config {path}: holds a {type(data).__name__}, right is a mapping of settings")
    values = _typed(Settings, data, f"--config {path}")
    if "sampling" in data:
        if not isinstance(data["sampling"], dict):
            raise UsageError(f"--config {path}: sampling is {data['sampling']!r}, right is a mapping")
        values["sampling"] = _typed(Sampling, data["sampling"], f"--config {path}: sampling")
    return values


def _typed(cls: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``data`` with every key known to ``cls`` and every value of its type."""
    hints = get_type_hints(cls)
    out: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            raise UsageError(f"{where}: unknown key {key!r}{_hint(cls, str(key), hints)}")
        if key != "sampling":
            out[key] = _coerce(hints[key], value, f"{where}: {key}")
    return out


def _hint(cls: type, key: str, known: Mapping[str, Any]) -> str:
    """What to write instead of an unknown key."""
    if cls is Settings and key in get_type_hints(Sampling):
        return "; it belongs under sampling"
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _coerce(hint: Any, value: Any, where: str) -> Any:
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if kinds[-1] is Ellipsis:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise UsageError(f"{where} = {value!r}, right is a text or a list of texts")
        return tuple(texts)
    kind = kinds[0]
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UsageError(f"{where} = {value!r}, right is {KINDS[kind]}")


def merge(from_file: Mapping[str, Any], from_flags: Mapping[str, Any]) -> Settings:
    """Settings from a file, overridden by the flags that were given.

    Raises:
        UsageError: a value is out of range.
    """
    sampling_names = {f.name for f in fields(Sampling)}
    chosen = {k: v for k, v in from_flags.items() if k in sampling_names}
    sampling = Sampling(**{**from_file.get("sampling", {}), **chosen})
    rest = {k: v for k, v in from_flags.items() if k not in sampling_names}
    return Settings(**{**from_file, **rest, "sampling": sampling})


def default_of(name: str) -> Any:
    """Default of a setting, for help texts."""
    for f in (*fields(Settings), *fields(Sampling)):
        if f.name == name:
            return None if f.default is MISSING else f.default
    raise UsageError(f"unknown setting {name!r}")
