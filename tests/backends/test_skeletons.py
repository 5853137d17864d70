"""The backends that are only designed for their chips: honest on every machine, and never one vendor's for another's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hal import machine
from hal.errors import BackendError
from hal.machine import Sight
from hal.plugins import load

FILES = {
    "cuda": ["dev/nvidia0", "proc/driver/nvidia/version"],
    "rocm": ["dev/kfd", "sys/class/kfd/kfd/topology/nodes/1/properties"],
    "ascend": ["dev/davinci0", "dev/davinci_manager", "usr/local/Ascend/driver/version.info"],
}
READER = {"cuda": "nvidia", "rocm": "amd", "ascend": "ascend"}
TEXT = {"sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 304\ngfx_target_version 90402\n"}
CHIPS = sorted(FILES)


def chip_machine(root: Path, *chips: str) -> Path:
    """A directory tree with the files of ``chips``."""
    for name in (f for chip in chips for f in FILES[chip]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(TEXT.get(name, "present\n"))
    return root


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make every plugin read a machine that has the chips named, and load the four of the tree."""

    def stand_in(*chips: str) -> None:
        root = chip_machine(tmp_path, *chips)
        for chip in CHIPS:
            reader: Callable[..., Sight] = getattr(machine, READER[chip])
            module = importlib.import_module(f"hal_{chip}.plugin")
            monkeypatch.setattr(module, READER[chip], lambda reader=reader: reader(root))
        monkeypatch.delenv("HAL_BACKEND", raising=False)
        monkeypatch.setenv("HAL_PLUGINS", ",".join(f"hal_{c}.plugin" for c in ("cpu", *CHIPS)))

    return stand_in


@pytest.mark.parametrize("present", CHIPS)
def test_each_plugin_sees_its_own_vendors_devices_only(present: str, on: Callable[..., None]) -> None:
    on(present)
    assert {b.name for b in load() if b.state == "ready"} == {present, "cpu"}
    assert {b.name for b in load() if b.state == "absent"} == set(CHIPS) - {present}


def test_without_a_device_every_reason_names_what_is_missing_and_the_remedy(on: Callable[..., None]) -> None:
    on()
    reasons = {b.name: b.why() for b in load()}
    assert "/dev/nvidia0" in reasons["cuda"]
    assert "/dev/kfd" in reasons["rocm"]
    assert "/dev/davinci0" in reasons["ascend"]
    assert all("install the" in reasons[chip] for chip in CHIPS)


HIDDEN = {
    "dev/nvidia0": "the NVIDIA driver is loaded, but no /dev/nvidia0 exists",
    "proc/driver/nvidia/version": "/dev/nvidia0 exist, but /proc/driver/nvidia/version does not",
    "dev/kfd": "the AMD topology shows 1 devices, but /dev/kfd does not exist",
    "sys/class/kfd/kfd/topology/nodes/1/properties": "/dev/kfd exists, but its topology shows no device that computes",
    "dev/davinci0": "Ascend software is installed (driver of unknown version), but no /dev/davinci0 exists",
    "dev/davinci_manager": "/dev/davinci0 exist, but /dev/davinci_manager does not",
    "usr/local/Ascend/driver/version.info": "/dev/davinci0 exist, but neither npu-smi nor /usr/local/Ascend/driver does",
}


@pytest.mark.parametrize(("chip", "hidden"), [(c, f) for c in CHIPS for f in FILES[c]])
def test_a_half_seen_device_is_absent_with_the_disagreement_as_its_reason(
    chip: str, hidden: str, on: Callable[..., None], tmp_path: Path
) -> None:
    on(chip)
    (tmp_path / hidden).unlink()
    backend = load().named(chip, "test")
    assert backend.state == "absent"
    assert backend.why().split(";")[0] == HIDDEN[hidden]


def test_auto_takes_the_cpu_and_says_why_not_the_chips(on: Callable[..., None]) -> None:
    on(*CHIPS)
    choice = load().choose("auto")
    assert choice.backend.name == "cpu"
    assert [line.split()[0] for line in choice.skipped] == CHIPS
    assert all("designed for its chip" in line and "no kernels" in line for line in choice.skipped)


@pytest.mark.parametrize("chip", CHIPS)
def test_chosen_by_name_it_has_no_kernels_and_says_so_when_opened(chip: str, on: Callable[..., None]) -> None:
    on(chip)
    backend = load().choose(chip).backend
    assert backend.kernels() == {}
    with pytest.raises(
        BackendError, match=f"backend {chip}: device 0 cannot be used: no kernels and no device services"
    ):
        backend.device(0)


@pytest.mark.parametrize("chip", CHIPS)
def test_chosen_by_name_without_a_device_it_stops_with_the_reason(chip: str, on: Callable[..., None]) -> None:
    on()
    with pytest.raises(BackendError, match=f"--backend {chip}: backend {chip} is absent: no "):
        load().choose(chip)


def test_info_says_designed_for_and_what_it_will_stand_on() -> None:
    seen: dict[str, Any] = {}
    for chip in CHIPS:
        module: ModuleType = importlib.import_module(f"hal_{chip}.plugin")
        info = module.hal_info()
        seen[info.name] = (info.maturity, info.stands_on)
    assert seen == {
        "ascend": ("designed-for", ("torch-npu>=2.11",)),
        "cuda": ("designed-for", ("triton>=3.6",)),
        "rocm": ("designed-for", ("triton>=3.6",)),
    }


def test_probing_imports_neither_torch_nor_a_chip_library() -> None:
    script = "import sys\n" + "".join(f"import hal_{c}.plugin as m; m.hal_info(); m.hal_probe()\n" for c in CHIPS)
    script += "print(sorted({'torch', 'triton', 'torch_npu', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
