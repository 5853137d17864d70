"""Settings: what a YAML file may hold, how flags override it, and what every range error says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hal.errors import UsageError
from hal_model.settings import Sampling, Settings, default_of, merge, read_yaml


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_yaml_file_sets_any_setting_and_the_sampling_below_it(tmp_path: Path) -> None:
    text = """
        model: /models/flash
        backend: cpu
        memory_share: 1
        max_seq_len: 128
        quantised_state: false
        fallback_budget: null
        plan: pinned.json
        sampling: {temperature: 0, top_k: 5, stop: [END., "\\n\\n"], ignore_eos: true}
    """
    settings = merge(read_yaml(yaml_file(tmp_path, text)), {})
    assert settings == Settings(
        model=Path("/models/flash"),
        backend="cpu",
        memory_share=1.0,
        max_seq_len=128,
        quantised_state=False,
        plan=Path("pinned.json"),
        sampling=Sampling(temperature=0.0, top_k=5, stop=("END.", "\n\n"), ignore_eos=True),
    )
    assert type(settings.memory_share) is float, "a whole number in the file is a number all the same"


def test_one_stop_text_needs_no_list(tmp_path: Path) -> None:
    assert read_yaml(yaml_file(tmp_path, "sampling: {stop: END.}")) == {"sampling": {"stop": ("END.",)}}


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "null\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert merge(read_yaml(yaml_file(tmp_path, text)), {}) == Settings()


WRONG_FILES = {
    "max_seq_length: 10": "unknown key 'max_seq_length'; did you mean max_seq_len?",
    "max-seq-len: 10": "unknown key 'max-seq-len'; did you mean max_seq_len?",
    "sampling: {temprature: 1}": "sampling: unknown key 'temprature'; did you mean temperature?",
    "temperature: 1": "unknown key 'temperature'; it belongs under sampling",
    "sampling: {backend: cpu}": "sampling: unknown key 'backend'; known are temperature, top_k, ",
    "zzz: 1": "unknown key 'zzz'; known are model, backend, ",
    "7: 1": "unknown key 7; known are model, ",
    "max_seq_len: many": "max_seq_len = 'many', right is a whole number",
    "max_seq_len: 1.5": "max_seq_len = 1.5, right is a whole number",
    "max_seq_len: true": "max_seq_len = True, right is a whole number",
    "max_seq_len: null": "max_seq_len = None, right is a whole number",
    "memory_share: half": "memory_share = 'half', right is a number",
    "memory_share: true": "memory_share = True, right is a number",
    "strict: 1": "strict = 1, right is true or false",
    "strict: 'no'": "strict = 'no', right is true or false",
    "backend: 3": "backend = 3, right is a text",
    "model: [a]": "model = ['a'], right is a path",
    "fallback_budget: x": "fallback_budget = 'x', right is a whole number",
    "sampling: {top_k: 2.0}": "sampling: top_k = 2.0, right is a whole number",
    "sampling: {stop: 5}": "sampling: stop = 5, right is a text or a list of texts",
    "sampling: {stop: [a, 1]}": "sampling: stop = ['a', 1], right is a text or a list of texts",
    "sampling: 3": "sampling is 3, right is a mapping",
    "sampling:": "sampling is None, right is a mapping",
    "- backend": "holds a list, right is a mapping of settings",
    "backend": "holds a str, right is a mapping of settings",
    "backend: [": "while parsing",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_refused_by_one_line_that_names_file_key_value_and_what_is_right(
    tmp_path: Path, text: str
) -> None:
    path = yaml_file(tmp_path, text + "\n")
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    message = str(caught.value)
    assert message.startswith(f"--config {path}: ")
    assert WRONG_FILES[text] in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config .*missing\.yaml: .*No such file"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match=re.escape(f"--config {tmp_path}: ") + ".*directory"):
        read_yaml(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match=r"--config .*binary\.yaml: .*codec"):
        read_yaml(binary)


def test_no_object_of_a_yaml_tag_is_built(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = yaml_file(tmp_path, f"backend: !!python/object/apply:os.mkdir ['{made}']\n")
    with pytest.raises(UsageError, match="could not determine a constructor"):
        read_yaml(path)
    assert not made.exists()


def test_a_flag_overrides_the_file_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    text = "max_seq_len: 64\nstrict: true\nsampling: {temperature: 0.5, top_k: 3}"
    settings = merge(read_yaml(yaml_file(tmp_path, text)), {"max_seq_len": 32, "temperature": 0.0, "stop": ("x",)})
    assert (settings.max_seq_len, settings.strict) == (32, True)
    assert settings.sampling == Sampling(temperature=0.0, top_k=3, stop=("x",))


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, list[Any], str]] = [
    ("temperature", [-0.1, NAN, INF], "0 (greedy) or above, finite"),
    ("top_k", [-1, 2**31], "from 0 (all) to below 2^31"),
    ("top_p", [0.0, 1.1, -1.0, NAN], "above 0 and at most 1"),
    ("min_p", [-0.1, 1.0, NAN], "from 0 to below 1"),
    ("seed", [-1, 2**62], "from 0 to below 2^62"),
    ("repetition_penalty", [0.0, -1.0, 0.001, 101.0, NAN, INF], "from 0.01 to 100 (1 is none)"),
    ("presence_penalty", [-2.1, 2.1, NAN], "from -2 to 2"),
    ("frequency_penalty", [-2.1, 2.1, NAN], "from -2 to 2"),
    ("max_tokens", [0, -1], "1 or above"),
    ("stop", [("",), ("a", "")], "texts that are not empty"),
    ("dtype", ["float16", ""], "bfloat16 or float32"),
    ("weight_format", ["fp16"], "auto, stored, dense, int8"),
    ("max_seq_len", [0, -1], "1 or above"),
    ("max_batch_size", [0, 2**16 + 1], "from 1 to 65536"),
    ("max_step_tokens", [0, 2**20 + 1], "from 1 to 1048576"),
    ("memory_share", [0.0, 1.01, NAN], "above 0 and at most 1"),
    ("threads", [0, -4], "1 or above"),
    ("fallback_budget", [-1], "0 or above"),
]


@pytest.mark.parametrize(("name", "values", "right"), OUT_OF_RANGE, ids=[case[0] for case in OUT_OF_RANGE])
def test_a_value_out_of_range_names_setting_value_and_what_is_right(name: str, values: list[Any], right: str) -> None:
    for value in values:
        with pytest.raises(UsageError) as caught:
            merge({}, {name: value})
        assert str(caught.value) == f"{name} = {value!r}, right is {right}"


AT_THE_EDGE: dict[str, list[Any]] = {
    "temperature": [0.0, 100.0],
    "top_k": [0, 2**31 - 1],
    "top_p": [1e-6, 1.0],
    "min_p": [0.0, 0.999],
    "seed": [0, 2**62 - 1],
    "repetition_penalty": [0.01, 100.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "max_tokens": [1],
    "max_batch_size": [1, 2**16],
    "max_step_tokens": [1, 2**20],
    "memory_share": [1e-9, 1.0],
    "threads": [None, 1],
    "fallback_budget": [None, 0],
}


@pytest.mark.parametrize("name", AT_THE_EDGE)
def test_values_at_the_edge_are_right(name: str) -> None:
    for value in AT_THE_EDGE[name]:
        settings = merge({}, {name: value})
        assert getattr(settings if hasattr(settings, name) else settings.sampling, name) == value


def test_every_setting_with_a_range_is_tested_above() -> None:
    free = {"model", "backend", "quantised_state", "affinity", "weight_cache", "strict", "plan", "check_values"}
    named = {case[0] for case in OUT_OF_RANGE}
    assert {*vars(Settings()), *vars(Sampling())} - named - free == {"sampling", "ignore_eos"}


def test_penalties_are_on_when_any_of_them_is() -> None:
    assert not Sampling().penalised
    assert Sampling(repetition_penalty=1.1).penalised
    assert Sampling(presence_penalty=-0.5).penalised
    assert Sampling(frequency_penalty=0.1).penalised


def test_help_texts_get_the_real_defaults() -> None:
    assert (default_of("max_seq_len"), default_of("temperature"), default_of("model")) == (4096, 1.0, None)
    with pytest.raises(UsageError, match="unknown setting 'nope'"):
        default_of("nope")
