"""The command line: one line and the cause's exit code for every error, and commands of other packages kept apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hal import errors
from hal.cli import run
from hal.errors import HalError

PLUGIN = """
from hal.plugin import DeviceInfo, Info, Probe, hookimpl
from hal.kernel import kernel
@kernel("rms_norm")
def fast(x, weight, eps): return x
@hookimpl
def hal_info(): return Info("acme", "Acme", ("1.0", "1.0"), stands_on=("acme-runtime>=2",), description="Test chip")
@hookimpl
def hal_probe(): return Probe((DeviceInfo(0, "Acme 1", "a1", 0, {"slot": "7"}),), ("slow link on slot 7",))
@hookimpl
def hal_register(register): register(fast)
@hookimpl
def hal_device(index): pass
"""
COMMANDS = """
import click
from hal.errors import CheckpointError, NoKernelError
print("noise while loading")
@click.command(short_help="Say hello.")
def hello(): click.echo("hello")
@click.command()
def damaged(): raise CheckpointError("model-00001.safetensors: cut at byte 7,\\nright is 9")
@click.command()
def interrupted(): raise KeyboardInterrupt
@click.command()
def answer(): return 42
not_one = "text"
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No HAL_ variables of the caller; modules written to ``tmp_path`` can be imported."""
    for variable in [v for v in os.environ if v.startswith("HAL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one plugin, ``acme``, and the modules of the tree."""
    (tmp_path / "acme_listed.py").write_text(PLUGIN)
    monkeypatch.setenv("HAL_PLUGINS", "acme_listed")
    monkeypatch.delitem(sys.modules, "acme_listed", raising=False)


@pytest.mark.usefixtures("acme")
def test_the_table_has_a_row_for_each_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STATE", "DEVICE", "WHY"]
    assert row.split("  ") == ["acme", "ready", "0: Acme 1 (a1)", "slow link on slot 7"]


@pytest.mark.usefixtures("acme")
def test_one_backend_shows_everything_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", "acme", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "origin: HAL_PLUGINS=acme_listed",
        "description: Test chip",
        "stands on: acme-runtime>=2",
        "device: 0: Acme 1 (a1) slot 7",
        "reason: slow link on slot 7",
        "kernels: 1 for 1 operators",
    ):
        assert line in lines


@pytest.mark.usefixtures("acme")
def test_check_counts_kernels_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", "--json", "--check"]) == 0
    (backend,) = json.loads(capsys.readouterr().out)["backends"]
    assert backend["kernels"] == {"rms_norm": ["acme_listed:fast"]}
    assert backend["devices"][0]["details"] == {"slot": "7"}
    assert backend["info"]["maturity"] == "supported"


def test_check_shows_errors_of_registration_and_exits_with_the_backends_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acme_bad.py").write_text(PLUGIN.replace('"rms_norm"', '"rms_nrom"'))
    monkeypatch.setenv("HAL_PLUGINS", "acme_bad")
    assert run(["backends"]) == 0
    assert "ready" in capsys.readouterr().out
    assert run(["backends", "--check"]) == 4
    out = capsys.readouterr().out
    assert "broken" in out
    assert "plugin acme, operator rms_nrom, kernel acme_bad:fast: no operator is called 'rms_nrom'" in out


@pytest.mark.usefixtures("acme")
def test_an_unknown_backend_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", "acne"]) == 4
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("hal: error: backends acne: no backend 'acne' (did you mean 'acme'?); known are acme")
    assert seen.err.count("\n") == 1


def test_wrong_flags_and_commands_are_one_line_and_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for args, cause in ((["backends", "--jsn"], "--jsn"), (["bakends"], "bakends"), (["--nothing"], "--nothing")):
        assert run(args) == 2
        err = capsys.readouterr().err
        assert err.startswith("hal: error: No such")
        assert cause in err
        assert err.count("\n") == 1


def test_help_lists_an_exit_code_for_every_error_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out.partition("Exit codes:")[2]
    rows = {line.split()[0] for line in text.splitlines() if line.strip() and line.split()[0].isdigit()}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HalError)]
    assert rows == {"0", "130", *(str(c.exit_code) for c in classes)}
    for cls in classes:
        if cls is not HalError:
            assert (cls.__doc__ or "").split(",")[0][:30] in " ".join(text.split())


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where another package brings commands."""
    (tmp_path / "acme_commands.py").write_text(COMMANDS)
    monkeypatch.delitem(sys.modules, "acme_commands", raising=False)
    names = ("hello", "damaged", "interrupted", "answer", "not_one", "gone")
    listed = [f"acme_commands:{n}" for n in names]
    monkeypatch.setenv("HAL_COMMANDS", ",".join([*listed, "greet=acme_commands:hello", "info=acme_commands:hello"]))


@pytest.mark.usefixtures("commands")
def test_a_command_of_another_package_runs_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hello"]) == 0
    first = capsys.readouterr()
    assert (first.out, first.err) == ("hello\n", "noise while loading\n")
    assert run(["greet"]) == 0
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.usefixtures("commands")
def test_help_lists_the_commands_and_those_that_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    good, _, broken = out.partition("Broken commands:")
    assert "Say hello." in good
    assert "noise" not in out
    text = " ".join(broken.split())
    assert "gone HAL_COMMANDS=acme_commands:gone: AttributeError: module 'acme_commands' has no attribute" in text
    assert "not-one HAL_COMMANDS=acme_commands:not_one: is a str, right is a click.Command" in text
    assert "info HAL_COMMANDS=info=acme_commands:hello: hal itself has a command of that name" in text


@pytest.mark.usefixtures("commands")
def test_a_broken_command_is_an_error_of_its_package_and_hals_own_still_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["gone"]) == 7
    assert "hal: error: command gone is broken: HAL_COMMANDS=acme_commands:gone:" in capsys.readouterr().err
    assert run(["info"]) == 0
    assert "python" in capsys.readouterr().out


@pytest.mark.usefixtures("commands")
def test_errors_of_commands_keep_their_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["damaged"]) == 3
    assert "hal: error: model-00001.safetensors: cut at byte 7, right is 9\n" in capsys.readouterr().err
    assert run(["interrupted"]) == 130
    assert run(["answer"]) == 0


def test_two_packages_with_one_command_are_both_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAL_COMMANDS", "hello=one:hello,hello=two:hello")
    assert run(["hello"]) == 7
    err = capsys.readouterr().err
    assert "two packages bring it: HAL_COMMANDS=hello=one:hello; HAL_COMMANDS=hello=two:hello" in err


def test_a_command_by_entry_point_is_imported_only_when_wanted(tmp_path: Path) -> None:
    (tmp_path / "lazy_commands.py").write_text("open('imported', 'w').close()\n" + COMMANDS)
    info = tmp_path / "lazy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hal.commands]\nhello = lazy_commands:hello\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def hal(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hal", *args], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    hal("backends")
    assert not (tmp_path / "imported").exists()
    assert hal("hello") == "hello\n"
    assert (tmp_path / "imported").exists()


@pytest.mark.usefixtures("acme")
def test_info_shows_versions_backends_and_hal_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backends"] == {"acme": "ready"}
    assert facts["environment"] == {"HAL_PLUGINS": "acme_listed"}
    assert facts["versions"]["torch"].startswith("2.")
    assert run(["info"]) == 0
    assert "HAL_PLUGINS" in capsys.readouterr().out


@pytest.mark.usefixtures("acme")
def test_doctor_reports_a_device_whose_libraries_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [f for f in findings if f["subject"] == "backend acme"]
    assert finding["level"] == "error"
    assert finding["seen"] == "acme-runtime is not installed, needed is acme-runtime>=2"


def test_doctor_reports_a_broken_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acme_torn.py").write_text("raise ImportError('libacme.so')")
    monkeypatch.setenv("HAL_PLUGINS", "acme_torn")
    assert run(["doctor"]) == 1
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "backend acme_torn" in row]
    assert line.startswith("error")
    assert "ImportError: libacme.so -> run hal backends acme_torn" in line


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hal-v4 ")
