"""``hal generate`` as a user runs it: what goes where, exit codes, and one line per error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hal_model.tokenizer import Tokenizer

Done = subprocess.CompletedProcess[str]
Hal = Callable[..., Done]
SMALL = ("--max-batch-size", "2", "--max-seq-len", "64", "--max-step-tokens", "16", "--backend", "cpu")


def error_of(done: Done, code: int) -> str:
    """The one line of a failed command, without its prefix; nothing on stdout, no traceback."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hal: error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.endswith(lines[0] + "\n"), "the error is the last thing said"
    return lines[0].removeprefix("hal: error: ")


# generate


def test_without_a_checkpoint_the_tiny_one_answers_and_says_so(hal: Hal, environment: dict[str, str]) -> None:
    done = hal("generate", *SMALL, "--max-tokens", "3", "--temperature", "0", input="Hello")
    assert done.returncode == 0, done.stderr
    cache = Path(environment["XDG_CACHE_HOME"]) / "hal"
    notes = [line for line in done.stderr.splitlines() if "no checkpoint given" in line]
    assert notes == [f"hal: no checkpoint given: using a tiny one with random weights, {cache / 'tiny-chat-1'}"]
    assert [p.name for p in cache.iterdir()] == ["tiny-chat-1"], "nothing half-written beside it"
    assert done.stdout.strip()
    for said in ("backend cpu on ", "3 tokens in ", "calls: ", "registry look-ups in steps: 0", "weights    used"):
        assert said in done.stderr


def test_json_is_one_object_with_answers_receipts_and_arenas(hal: Hal, checkpoint: Path) -> None:
    prompts = ("-p", "one", "-p", "the second")
    done = hal("generate", checkpoint, *SMALL, "--raw", "--max-tokens", "2", "--temperature", "0", "--json", *prompts)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"backend", "answers", "seconds", "receipts", "arenas", "notes"}
    assert result["backend"] == "cpu"
    assert [a["prompt_tokens"] for a in result["answers"]] == [1 + 3, 1 + 10], "the start token and one a byte"
    tokenizer = Tokenizer.load(checkpoint)
    for answer in result["answers"]:
        assert len(answer["tokens"]) == 2
        assert answer["finish"] in ("length", "stop")
        assert answer["text"] == tokenizer.decode(answer["tokens"]) or 1 in answer["tokens"]
    calls = {r["operator"]: r["calls"] for r in result["receipts"]}
    assert calls["sample"] == 3, "two prompts, then one step together"
    assert calls["decoder_layer"] == 3 * 3
    assert [a["name"] for a in result["arenas"]] == ["weights", "state", "workspace"]


def test_two_prompts_print_two_answers_in_their_order_and_no_report_is_no_report(hal: Hal, checkpoint: Path) -> None:
    flags = ("--raw", "--max-tokens", "1", "--temperature", "0", "--no-report")
    done = hal("generate", checkpoint, *SMALL, *flags, "-p", "b", "-p", "a")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.removeprefix("[0] ").split("\n[1] ")
    assert first
    assert second
    assert first != second
    assert "tokens/s" not in done.stderr


def test_ctrl_c_ends_generation_with_130_and_without_a_traceback(environment: dict[str, str], checkpoint: Path) -> None:
    flags = ("--max-seq-len", "4096", "--max-tokens", "4000", "--ignore-eos", "--raw", "-p", "a", "--backend", "cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "hal", "generate", str(checkpoint), "--max-batch-size", "1", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.read(1), "text streams while generation runs"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert b"hal: error:" not in errors


WRONG_FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "temperature": (("--temperature", "-1"), "temperature = -1.0, right is 0 (greedy) or above"),
    "top-p": (("--top-p", "1.5"), "top_p = 1.5, right is above 0 and at most 1"),
    "not a number": (("--top-k", "many"), "Invalid value for '--top-k': 'many' is not a valid integer."),
    "unknown flag": (("--temprature", "1"), "No such option"),
    "two checkpoints": (("a", "b"), "Got unexpected extra argument (b)"),
    "empty stop text": (("--stop", ""), "stop = ('',), right is texts that are not empty"),
    "raw with system": (("--raw", "--system", "Be brief."), "--raw takes the text as it is; --system, "),
    "raw with thinking": (("--raw", "--no-thinking"), "--raw takes the text as it is; --system, --thinking"),
    "missing config": (("--config", "missing.yaml"), "--config missing.yaml: "),
}


@pytest.mark.parametrize("case", WRONG_FLAGS)
def test_a_wrong_flag_is_one_line_and_exit_code_2(hal: Hal, case: str) -> None:
    flags, message = WRONG_FLAGS[case]
    assert message in error_of(hal("generate", "-p", "x", *flags), 2)


def test_a_wrong_key_of_a_config_file_names_file_key_and_the_right_one(hal: Hal, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_sequence_len: 64\n")
    message = error_of(hal("generate", "--config", file, "-p", "x"), 2)
    assert message == f"--config {file}: unknown key 'max_sequence_len'; did you mean max_seq_len?"


def test_a_prompt_that_is_not_utf_8_is_refused(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "hal", "generate"]
    done = subprocess.run(command, input=b"ab\xff", env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"hal: error: standard input: byte 0xff at 2, right is UTF-8\n"


def test_an_unknown_backend_is_exit_code_4_with_those_there_are(hal: Hal, checkpoint: Path) -> None:
    message = error_of(hal("generate", checkpoint, "-p", "x", "--backend", "nope"), 4)
    assert message.startswith("--backend nope: ")
    assert "cpu (ready)" in message


def test_a_missing_checkpoint_is_exit_code_3_and_named(hal: Hal, tmp_path: Path) -> None:
    message = error_of(hal("generate", tmp_path / "none", "-p", "x"), 3)
    assert message.startswith(f"{tmp_path / 'none' / 'config.json'}: no such file")


def test_a_cut_shard_is_exit_code_3_and_named(hal: Hal, tmp_path: Path, checkpoint: Path) -> None:
    copy = tmp_path / "cut"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    message = error_of(hal("generate", copy, "-p", "x"), 3)
    assert str(copy / "model-00001-of-00001.safetensors") in message


def test_too_little_memory_is_exit_code_6_and_tells_what_would_fit(hal: Hal, checkpoint: Path) -> None:
    flags = ("--max-seq-len", "1048576", "--max-batch-size", "16384", "--backend", "cpu")
    message = error_of(hal("generate", checkpoint, "-p", "x", *flags), 6)
    assert "--max-seq-len" in message
    fits = int(message.rpartition("max_seq_len ")[2].split()[0])
    assert 0 < fits < 1048576


def test_a_length_beyond_the_context_is_exit_code_2(hal: Hal, checkpoint: Path) -> None:
    message = error_of(hal("generate", checkpoint, "-p", "x", "--max-seq-len", "2000000"), 2)
    assert message == "max_seq_len = 2000000, right is at most the model's context of 1048576"


def test_a_prompt_that_is_too_long_is_exit_code_2_with_both_numbers(hal: Hal, checkpoint: Path) -> None:
    done = hal("generate", checkpoint, *SMALL, "--raw", "--max-tokens", "8", "-p", "x" * 60)
    assert "prompt of 61 tokens + max_tokens 8 = 69 exceed max_seq_len 64" in error_of(done, 2)


def test_strict_from_a_config_file_is_exit_code_5_and_names_every_operator_without_a_kernel(
    hal: Hal, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("strict: true\nmax_step_tokens: 16\nsampling: {max_tokens: 1}\n")
    ledger = json.loads(hal("explain", *SMALL, "--json").stdout)
    missing = {row["operator"] for row in ledger if row["via"] == "reference"}
    strict = hal("generate", checkpoint, *SMALL, "--config", tmp_path / "run.yaml", "--raw", "-p", "x")
    if missing:
        message = error_of(strict, 5)
        assert message.startswith(f"--strict: {len(missing)} operators have no kernel on cpu, allowed 0: ")
        assert {part.split(" (")[0] for part in message.partition("allowed 0: ")[2].split("; ")} >= missing
    else:
        assert strict.returncode == 0, strict.stderr
