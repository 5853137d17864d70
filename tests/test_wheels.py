"""What users install: the wheels and sdists of every distribution, in a fresh environment, beside a vendor's own folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"hal-v4": ROOT} | {f"hal-v4-{chip}": ROOT / "backends" / chip for chip in ("cpu", "cuda", "rocm", "ascend")}
PACKAGES = {"hal-v4": ("hal", "hal_ops", "hal_model", "hal_conformance")} | {
    name: (name.replace("hal-v4-", "hal_"),) for name in SOURCES if name != "hal-v4"
}
IMPORTS = "hal, hal_ops, hal_model, hal_conformance"
POISON = "raise RuntimeError(f'a vendor folder was imported as a package of ours: {__file__}')\n"


def run(command: list[str | Path], cwd: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with an environment that shows it nothing of this checkout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "PYTHON", "COV_", "XDG_"))}
    env |= {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command} in {cwd}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of every distribution and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    builds = [
        subprocess.Popen(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source],
            cwd=out,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for source in SOURCES.values()
    ]
    printed = [build.communicate(timeout=120)[0] for build in builds]
    assert [build.returncode for build in builds] == [0] * len(builds), "\n".join(printed)
    return out


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that matches."""
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{folder}: {pattern} matches {[p.name for p in found]}, right is one file"
    return found[0]


def wheel_of(dist: Path, name: str) -> Path:
    """The wheel of a distribution."""
    return only(dist, f"{name.replace('-', '_')}-[0-9]*.whl")


@dataclass(frozen=True)
class Installed:
    """A fresh environment with the wheels; third-party packages come from the environment that runs the tests."""

    folder: Path
    home: Path

    @property
    def site(self) -> Path:
        """Where the wheels' packages lie."""
        return only(self.folder, "lib/python3*/site-packages")

    def run(self, cwd: Path, *command: str) -> str:
        """What ``bin/COMMAND …`` prints to stdout."""
        return run([self.folder / "bin" / command[0], *command[1:]], cwd, self.home).stdout


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install every wheel into a fresh environment, then let it see the third-party packages of this one."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", folder], home, home)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    run([*pip, "--no-deps", "--no-index", "--quiet", *(wheel_of(dist, name) for name in SOURCES)], home, home)
    made = Installed(folder, home)
    # A folder named by a .pth file is searched, but .pth files in it, such as those of editable installs, are not read.
    paths = sysconfig.get_paths()
    (made.site / "third_party.pth").write_text("\n".join(sorted({paths["purelib"], paths["platlib"]})), "utf-8")
    return made


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A vendor's working folder: packages `ops`, `model`, … that must not be imported, and a plain folder `hal`."""
    for name in ("ops", "model", "engine", "conformance", "backends"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(POISON, "utf-8")
    (tmp_path / "hal").mkdir()
    (tmp_path / "hal" / "cli.py").write_text(POISON, "utf-8")
    return tmp_path


@pytest.fixture
def beside_hal(beside: Path) -> Path:
    """The same folder when `hal` is a package too: Python itself would take it first for ``-m`` and ``-c``."""
    (beside / "hal" / "__init__.py").write_text(POISON, "utf-8")
    return beside


@pytest.mark.parametrize("name", SOURCES)
def test_a_wheel_holds_its_typed_packages_and_the_licence_and_nothing_else(name: str, dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist, name)) as wheel:
        names = wheel.namelist()
        info = next(n for n in names if n.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        licence = wheel.read(f"{info}licenses/LICENSE").decode()
    assert {n.partition("/")[0] for n in names} == {*PACKAGES[name], info.rstrip("/")}
    assert {f"{package}/py.typed" for package in PACKAGES[name]} <= set(names)
    assert licence == (ROOT / "LICENSE").read_text("utf-8")


@pytest.mark.parametrize("name", SOURCES)
def test_a_wheel_holds_every_module_of_the_tree(name: str, dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist, name)) as wheel:
        found = {n for n in wheel.namelist() if n.endswith(".py")}
    folders = [next(ROOT.glob(f"*/{p}"), ROOT / "backends" / p.removeprefix("hal_") / p) for p in PACKAGES[name]]
    assert found == {str(path.relative_to(f.parent)) for f in folders for path in f.rglob("*.py")}


@pytest.mark.parametrize("name", SOURCES)
def test_an_sdist_holds_no_tests_and_no_other_distribution(name: str, dist: Path) -> None:
    with tarfile.open(only(dist, f"{name.replace('-', '_')}-[0-9]*.tar.gz")) as sdist:
        names = {member.partition("/")[2] for member in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert [n for n in names if n.startswith(("tests/", "backends/", "examples/", ".venv/"))] == []


def test_the_framework_names_each_chip_as_an_extra_and_the_cpu_as_a_dependency(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist, "hal-v4")) as wheel:
        metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(wheel.read(metadata).decode())
    requires = fields.get_all("Requires-Dist", [])
    version = fields["Version"]
    assert f"hal-v4-cpu=={version}" in requires
    for chip in ("cuda", "rocm", "ascend"):
        assert f"hal-v4-{chip}=={version}; extra == '{chip}'" in requires


def test_every_distribution_has_the_same_version_and_python_range() -> None:
    projects = [tomllib.loads((s / "pyproject.toml").read_text("utf-8"))["project"] for s in SOURCES.values()]
    shared = ("version", "requires-python", "license", "classifiers")
    assert [{key: p[key] for key in shared} for p in projects] == [{key: projects[0][key] for key in shared}] * 5


def test_the_packages_imported_are_those_of_the_wheels(installed: Installed, beside: Path) -> None:
    names = [package for packages in PACKAGES.values() for package in packages]
    code = f"import json, importlib; print(json.dumps([importlib.import_module(n).__file__ for n in {names}]))"
    files = json.loads(installed.run(beside, "python", "-c", code))
    assert files == [str(installed.site / name / "__init__.py") for name in names]


def test_no_folder_of_the_tree_is_importable_under_its_own_name(installed: Installed, tmp_path: Path) -> None:
    names = ["ops", "model", "engine", "conformance", "backends"]
    code = f"import importlib.util; print([n for n in {names} if importlib.util.find_spec(n)])"
    assert installed.run(tmp_path, "python", "-c", code) == "[]\n"


@pytest.mark.parametrize("flag", [(), ("-P",)], ids=["", "-P"])
def test_hal_runs_as_a_module_and_lists_every_backend(
    flag: tuple[str, ...], installed: Installed, beside: Path
) -> None:
    if flag:  # safe path: not even a package named hal in the working folder is in the way
        (beside / "hal" / "__init__.py").write_text(POISON, "utf-8")
    listed = json.loads(installed.run(beside, "python", *flag, "-m", "hal", "backends", "--json"))["backends"]
    assert [b["name"] for b in listed] == ["ascend", "cpu", "cuda", "rocm"]
    assert [b["errors"] for b in listed] == [[]] * 4
    assert [b["origin"].rpartition(" of ")[2] for b in listed] == [f"hal-v4-{b['name']} 0.1.0" for b in listed]


def test_help_lists_the_commands_of_every_package_and_none_is_broken(installed: Installed, beside_hal: Path) -> None:
    text = installed.run(beside_hal, "hal", "--help")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for command in ("backends", "doctor", *project["entry-points"]["hal.commands"]):
        assert f"\n  {command} " in text
    assert "Broken" not in text


def test_tokens_are_generated(installed: Installed, beside_hal: Path) -> None:
    done = run(
        [installed.folder / "bin" / "hal", "generate", "-p", "hi", "--max-tokens", "2"], beside_hal, installed.home
    )
    assert "2 tokens in " in done.stderr
    assert done.stdout.strip()
