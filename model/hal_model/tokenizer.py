"""The checkpoint's tokenizer: text to token ids and back, whole or as a stream (spec section 6.1).

Ordinary text and special tokens are kept apart: ``encode(text, allow_special=False)`` knows no special token at all,
so nothing that a user writes can become one. Ids come from the checkpoint's tokenizer.json; no marker is ever added.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import CheckpointError, InputError, UsageError
from hal_model.special_tokens import BOS, EOS, PROMPT_TOKENS

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    own = [b for b in range(256) if 0x21 <= b <= 0x7E or (0xA1 <= b <= 0xFF and b != 0xAD)]
    rest = [b for b in range(256) if b not in set(own)]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(rest)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); a checkpoint holds this file") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON in UTF-8 ({error}); the file is damaged") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the top level is {type(value).__name__}; it must be a JSON object")
    return value


def _build(path: Path, spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Engine

    try:
        return Engine.from_str(json.dumps(spec, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception for every defect of the file
        raise CheckpointError(f"{path}: the tokenizers library refuses it ({error})") from error


def _is_table(value: object) -> bool:
    """Whether `value` maps token texts to ids."""
    return isinstance(value, dict) and all(type(i) is int and i >= 0 for i in value.values())


def _check_spec(path: Path, spec: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json that is not byte-level BPE, naming the field."""
    for section, right in (("model", "BPE"), ("decoder", "ByteLevel")):
        kind = spec[section].get("type") if isinstance(spec.get(section), dict) else None
        if kind != right:
            raise CheckpointError(f"{path}: {section}.type is {kind!r}; a V4 tokenizer has {right!r}")
    if not _is_table(spec["model"].get("vocab")):
        raise CheckpointError(f"{path}: model.vocab must map token texts to ids >= 0")
    for n, entry in enumerate(spec.get("added_tokens") or []):
        if not (isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str)):
            raise CheckpointError(f"{path}: added_tokens[{n}] is {entry!r:.80}; it needs an integer id and a content")


def _marker_id(path: Path, config: Mapping[str, Any], key: str, special: Mapping[str, int]) -> int:
    """Id of `bos_token` or `eos_token`, written in tokenizer_config.json as a text or as an object with `content`."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or text not in special:
        raise CheckpointError(f"{path}: {key} is {text!r}; it must be one of the added tokens of {TOKENIZER_FILE}")
    return special[text]


@dataclass(frozen=True)
class Tokenizer:
    """Byte-level BPE of one checkpoint; make it with `Tokenizer.load`.

    `vocab_size` counts rows (highest id + 1). `special` maps the text of every added token to its id.
    """

    path: Path
    bos_id: int
    eos_id: int
    special: Mapping[str, int] = field(repr=False)
    _texts: tuple[str | None, ...] = field(repr=False)
    _plain: tokenizers.Tokenizer = field(repr=False)
    _spec: Mapping[str, Any] = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json of the checkpoint folder `path`.

        Raises CheckpointError naming the file (and field) that is missing, damaged or not byte-level BPE.
        """
        file = path / TOKENIZER_FILE
        spec, config = _read_json(file), _read_json(path / CONFIG_FILE)
        _check_spec(file, spec)
        special = {t["content"]: t["id"] for t in spec.get("added_tokens") or []}
        bos, eos = (_marker_id(path / CONFIG_FILE, config, key, special) for key in ("bos_token", "eos_token"))
        ids = {**spec["model"]["vocab"], **special}
        if max(ids.values()) > 2 * len(ids):
            raise CheckpointError(f"{file}: token id {max(ids.values())} with {len(ids)} tokens; ids must be dense")
        texts: list[str | None] = [None] * (max(ids.values()) + 1)
        for text, i in ids.items():
            texts[i] = text
        plain = _build(file, {**spec, "added_tokens": [], "truncation": None, "padding": None})
        return cls(file, bos, eos, special, tuple(texts), plain, spec)

    @property
    def vocab_size(self) -> int:
        return len(self._texts)

    @functools.cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        return _build(self.path, {**self._spec, "truncation": None, "padding": None})

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Token ids of `text`, with no BOS or EOS added.

        With ``allow_special=False`` the texts of special tokens are ordinary characters: no special id comes out.
        Raises UsageError for a lone surrogate, which has no UTF-8 bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"text: lone surrogate {text[error.start]!r} at character {error.start}") from error
        engine = self._with_special if allow_special else self._plain
        return list(engine.encode(text, add_special_tokens=False).ids)

    def token_id(self, text: str) -> int:
        """Id of the special token with exactly this text; CheckpointError when the checkpoint has none."""
        if text not in self.special:
            raise CheckpointError(f"{self.path}: no added token {text!r}; prompts of DeepSeek V4 need it")
        return self.special[text]

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token stands for; they may hold part of a character only."""
        text = self._texts[token_id] if 0 <= token_id < len(self._texts) else None
        if text is None:
            raise InputError(f"token id {token_id}: {self.path} has no such token; ids are 0..{self.vocab_size - 1}")
        table = _byte_of_char()
        if text in self.special or any(c not in table for c in text):
            return text.encode()
        return bytes(table[c] for c in text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")


class StreamDecoder:
    """Decodes one token at a time; the pieces joined equal `Tokenizer.decode` of all ids.

    Bytes of an unfinished character wait for the next token; `finish` gives what never became one as one U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """The rest of the stream; afterwards the decoder is as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _added_token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": True}


def _byte_spec(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json of the byte tokenizer: prompt tokens, then the 256 bytes, then place holders up to the size."""
    first_byte = len(PROMPT_TOKENS)
    first_free = first_byte + 256
    special = dict(enumerate(PROMPT_TOKENS))
    special |= {i: f"<｜place▁holder▁no_{i - first_free}｜>" for i in range(first_free, vocab_size)}
    vocab = {text: i for i, text in special.items()}
    vocab |= {char: first_byte + byte for char, byte in _byte_of_char().items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, text) for i, text in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])), "merges": []},
    }


def write_byte_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write the tokenizer of a small random checkpoint into `directory`: one token a byte, and the prompt tokens.

    BOS is 0, EOS 1, pad 2, the other prompt tokens follow, then the bytes; ids up to `vocab_size` are place holders,
    so that every id which a model of that size can sample decodes. Raises UsageError when `vocab_size` is too small.
    """
    least = 256 + len(PROMPT_TOKENS)
    if vocab_size < least:
        raise UsageError(
            f"vocab_size: {vocab_size} is too small; 256 bytes and the prompt tokens need at least {least}"
        )
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in ((TOKENIZER_FILE, _byte_spec(vocab_size)), (CONFIG_FILE, config)):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
