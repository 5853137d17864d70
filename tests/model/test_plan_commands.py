"""The commands init-checkpoint, plan, explain and ops, as a user runs them."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hal.errors import UsageError
from hal_model.checkpoint import Checkpoint
from hal_model.config import PRESETS, ModelConfig
from hal_model.explain import parse_shape
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


# init-checkpoint


def test_init_checkpoint_writes_what_the_reader_reads(hal: Hal, tmp_path: Path) -> None:
    out = tmp_path / "new" / "tiny"
    done = hal("init-checkpoint", out, "--preset", "tiny", "--experts", "bf16", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: ")
    assert ModelConfig.from_dir(out) == replace(PRESETS["tiny"], expert_dtype=None)
    source = Checkpoint.open(out)
    source.verify(PRESETS["tiny"])
    assert source.spec("layers.0.ffn.experts.0.w1.weight").dtype == "BF16"
    assert Tokenizer.load(out).vocab_size == PRESETS["tiny"].vocab_size
    assert [p.name for p in out.parent.iterdir()] == ["tiny"]


def test_init_checkpoint_refuses_an_existing_folder_and_leaves_it_alone(hal: Hal, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    message = error_of(hal("init-checkpoint", tmp_path), 2)
    assert message == f"{tmp_path}: is not empty; right: a new or empty folder"
    assert [p.read_text() for p in tmp_path.iterdir()] == ["precious"]


def test_init_checkpoint_of_an_unknown_preset_or_format_leaves_nothing(hal: Hal, tmp_path: Path) -> None:
    message = error_of(hal("init-checkpoint", tmp_path / "a", "--preset", "tinny"), 2)
    assert message.startswith("--preset 'tinny', right is one of flash, pro, ")
    both = hal("init-checkpoint", tmp_path / "a", "--preset", "tiny", "--config-json", "x.json")
    assert error_of(both, 2) == "give either --preset or --config-json"
    assert "fp5" in error_of(hal("init-checkpoint", tmp_path / "a", "--experts", "fp5"), 2)
    assert list(tmp_path.iterdir()) == []


def test_init_checkpoint_on_a_full_disk_leaves_nothing(hal: Hal, tmp_path: Path) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    message = error_of(hal("init-checkpoint", tmp_path / "new" / "a", preexec_fn=full), 2)
    assert message.startswith(f"{tmp_path / 'new' / 'a'}: cannot be written (")
    assert list(tmp_path.iterdir()) == []


def test_init_checkpoint_without_room_for_a_tokenizer_in_the_vocabulary_leaves_nothing(
    hal: Hal, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(replace(PRESETS["tiny"], vocab_size=64).to_dict()))
    message = error_of(hal("init-checkpoint", tmp_path / "a", "--config-json", file), 2)
    assert message.startswith("vocab_size: 64 is too small")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


# plan, explain, ops


def test_a_plan_is_saved_compared_and_served(hal: Hal, tmp_path: Path, checkpoint: Path) -> None:
    file = tmp_path / "plan.json"
    made = hal("plan", checkpoint, *SMALL, "--save", file, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == json.loads(file.read_text())
    assert list(json.loads(made.stdout)["buckets"]) == ["decode:1-1", "decode:2-2", "prefill:1-16"]

    same = hal("plan", checkpoint, *SMALL, "--diff", file)
    assert (same.returncode, same.stdout) == (0, "the plans serve the same kernels\n")
    served = hal("generate", checkpoint, *SMALL, "--plan", file, "--raw", "--max-tokens", "1", "-p", "a")
    assert served.returncode == 0, served.stderr

    wider = hal("plan", checkpoint, *SMALL, "--max-step-tokens", "8", "--diff", file)
    assert wider.returncode == 1
    assert "prefill:1-8 sample: absent -> " in wider.stdout


def test_a_plan_that_cannot_be_made_as_asked_is_refused_at_once(hal: Hal, tmp_path: Path, checkpoint: Path) -> None:
    file = tmp_path / "none" / "plan.json"
    assert error_of(hal("plan", *SMALL, "--save", file), 2).startswith(f"--save {file}: {file.parent} is no folder")
    both = error_of(hal("plan", checkpoint, "--preset", "tiny"), 2)
    assert both == f"--preset tiny: a checkpoint is given too, {checkpoint}; right is one of them"


def test_explain_tells_who_serves_an_operator_at_a_shape(hal: Hal) -> None:
    done = hal("explain", "rms_norm", "--shape", "N=1,D=256", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {(row["operator"], row["axes"]["N"], row["axes"]["D"]) for row in rows} == {("rms_norm", 1, 256)}
    assert all(row["via"] in ("kernel", "reference") and row["cost"]["bytes"] > 0 for row in rows)
    text = hal("explain", *SMALL)
    assert {line.split()[0] for line in text.stdout.splitlines() if not line.startswith(" ")} >= {"rms_norm", "sample"}


def test_explain_suggests_an_operator_and_the_axes_that_there_are(hal: Hal) -> None:
    message = error_of(hal("explain", "rmsnorm"), 2)
    assert message == "operator 'rmsnorm' is unknown; did you mean rms_norm?"
    message = error_of(hal("explain", "rms_norm", "--shape", "T=1", *SMALL), 2)
    assert message == "--shape 'T=1': no axis T here, right is one of N, D"


def test_a_shape_is_axes_and_sizes() -> None:
    assert parse_shape(None) == parse_shape("") == {}
    assert parse_shape("N=1, D=1024") == {"N": 1, "D": 1024}
    for wrong in ("N", "N=", "N=x", "N=-1", "N=1.5", "N=²", "N=1;D=2", "=1"):
        with pytest.raises(UsageError, match=r"--shape .*, right is AXIS=SIZE, separated by commas"):
            parse_shape(wrong)


def test_ops_lists_every_operator_and_one_in_full(hal: Hal) -> None:
    listed = hal("ops")
    assert listed.returncode == 0, listed.stderr
    levels = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines()}
    assert levels["rms_norm"] == "primitive"
    assert levels["decoder_layer"] == "layer"
    (one,) = json.loads(hal("ops", "rms_norm", "--json").stdout)
    assert (one["name"], one["level"], one["composite"], one["variable"]) == ("rms_norm", "primitive", False, ["N"])
    assert one["samples"] > 0
    assert one["signature"].startswith("rms_norm(x")
