"""The English texts of a prompt, read from the checkpoint's own encoder file and known by their SHA-256.

The tools block, the response-format block and the effort prefixes are not part of this repository (spec sections 6.2,
6.3). They stand as string constants in ``encoding/encoding_dsv4.py`` of the checkpoint, which is parsed, never run.
"""

from __future__ import annotations

import ast
import hashlib
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hal.errors import CheckpointError, UsageError
from hal_model.special_tokens import DSML, THINK_END, THINK_START

ENCODER_FILE = Path("encoding") / "encoding_dsv4.py"

# Name of a text -> SHA-256 of its UTF-8 bytes. "tools" is hashed as rendered with no tool; the others as written.
FINGERPRINTS: Mapping[str, str] = {
    "tools": "c7d3159308f7d076bee8974ece110fda1f92f6e577306e602ba2b466b4dcd904",
    "response_format": "012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5",
    "effort_preview_max": "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
    "effort_0731_high": "7a93687f9a5fe2212ea280aea1a641de8495e64131bfb5b74c15965c06c5e2ee",
    "effort_0731_max": "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
}

# Encoder version -> effort -> names of its prefix, the first one present counts; no name: no prefix.
EFFORTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "preview": {"high": (), "max": ("effort_preview_max",)},
    # "high" of 0731 was seen both as a text of its own and as the preview's "max" text.
    "0731": {"low": (), "high": ("effort_0731_high", "effort_preview_max"), "max": ("effort_0731_max",)},
}


class Special(str):
    """Text of one special token, as a piece of a prompt; every other piece is ordinary text."""

    __slots__ = ()


_TOKEN_FIELDS: Mapping[str, Special] = {
    "dsml_token": Special(DSML),
    "thinking_start_token": Special(THINK_START),
    "thinking_end_token": Special(THINK_END),
}


def fill(template: str, values: Mapping[str, str]) -> list[str]:
    """Pieces of `template` with its ``{name}`` fields replaced; token fields become `Special` pieces.

    Only plain names are fields (no attribute, index, conversion or width); anything else raises ValueError.
    """
    known = {**_TOKEN_FIELDS, **values}
    pieces: list[str] = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        pieces.append(literal)
        if name is None:
            continue
        if name not in known or spec or conversion:
            raise ValueError(f"field {name!r} is unknown")
        pieces.append(known[name])
    return [piece for piece in pieces if piece]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digests(constant: str) -> Iterator[str]:
    """Digests under which a string constant may be known: as written, and rendered as a tools block with no tool."""
    yield _sha256(constant)
    if "{tool_schemas}" in constant:
        try:
            yield _sha256("".join(fill(constant, {"tool_schemas": ""})))
        except ValueError:  # not a template that we could render: not the text that we look for
            return


def _string_constants(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: not a Python file ({error}); the checkpoint's encoder file is damaged"
        ) from error
    return (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


@dataclass(frozen=True)
class PromptTexts:
    """The texts found in one checkpoint; ``PromptTexts()`` has none and serves chats that need none.

    `found` maps a name of `fingerprints` to its text; `source` is the encoder file looked at (it need not exist).
    """

    found: Mapping[str, str] = field(default_factory=dict)
    source: Path = ENCODER_FILE
    fingerprints: Mapping[str, str] = field(default_factory=lambda: FINGERPRINTS)

    @classmethod
    def from_checkpoint(cls, directory: Path, fingerprints: Mapping[str, str] = FINGERPRINTS) -> PromptTexts:
        """Read the texts from `directory`/encoding/encoding_dsv4.py without running it.

        A missing file or text is no error here: the prompt that needs it raises. A damaged file is CheckpointError.
        """
        source = directory / ENCODER_FILE
        if not source.exists():
            return cls(source=source, fingerprints=fingerprints)
        names = {digest: name for name, digest in fingerprints.items()}
        found = {names[d]: text for text in _string_constants(source) for d in _digests(text) if d in names}
        return cls(found, source, fingerprints)

    @property
    def version(self) -> str | None:
        """Encoder version told by the texts present: "preview", "0731", or None when no effort text is known."""
        if "effort_0731_max" in self.found:
            return "0731"
        return "preview" if "effort_preview_max" in self.found else None

    def need(self, *names: str) -> str:
        """The first text present of `names`; CheckpointError naming the file and digests when there is none."""
        for name in names:
            if name in self.found:
                return self.found[name]
        wanted = " or ".join(f"{name!r} (SHA-256 {self.fingerprints.get(name, 'unknown')})" for name in names)
        state = "holds no string constant" if self.source.exists() else "is missing, so there is no text"
        raise CheckpointError(f"{self.source}: {state} {wanted}; copy the file from the official checkpoint")

    def tools_block(self, schemas: Sequence[str]) -> list[str]:
        """Pieces of the tools block, one JSON text a function object."""
        return fill(self.need("tools"), {"tool_schemas": "\n".join(schemas)})

    def response_format_block(self, schema: str) -> list[str]:
        """Pieces of the response-format block around a JSON text."""
        return fill(self.need("response_format"), {"schema": schema})

    def effort_prefix(self, effort: str | None) -> str:
        """Text before the first message in thinking mode (spec 6.3); None is the default effort: no prefix.

        Raises UsageError for an effort that this encoder version does not know, CheckpointError when the version
        or the text cannot be told from the checkpoint.
        """
        if effort is None:
            return ""
        levels = EFFORTS[self.version] if self.version else {e: () for v in EFFORTS.values() for e in v}
        if effort not in levels:
            raise UsageError(
                f"effort: {effort!r} is unknown to the {self.version or 'V4'} encoder; use one of {', '.join(levels)}"
            )
        if self.version is None:
            return self.need("effort_preview_max", "effort_0731_max")
        return self.need(*levels[effort]) if levels[effort] else ""
