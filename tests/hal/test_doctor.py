"""The doctor on machines made of files: every disagreement is a finding, with what was seen and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hal.doctor import Finding, examine, exit_code, python_finding
from hal.machine import amd, ascend, gfx_name, nvidia
from hal.versions import release, unmet, within

GOOD = {"torch": "2.13.0", "numpy": "2.4.6", "safetensors": "0.8.0"}
CPU = "processor : 0\nmodel name : Xeon\nflags : fpu avx2 avx512f amx_bf16\nprocessor : 1\nflags : fpu avx2\n"
PLAIN = {
    "proc/cpuinfo": CPU,
    "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
}
H200 = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-1a2b\nBus Location: \t 0000:00:06.0\nDevice Minor: \t {minor}\n"
NVIDIA_DRIVER = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
    "proc/driver/nvidia/gpus/0000:00:06.0/information": H200.format(minor=0),
}
NVIDIA_NODE = {"dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}
NODES = "sys/class/kfd/kfd/topology/nodes"
AMD_TOPOLOGY = {
    f"{NODES}/0/properties": "simd_count 0\ncpu_cores_count 96\n",
    f"{NODES}/1/properties": "simd_count 1216\ngfx_target_version 90402\n",
    f"{NODES}/1/name": "ip discovery\n",
    f"{NODES}/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\n",
    f"{NODES}/10/properties": "simd_count 1024\ngfx_target_version 90500\n",
}
AMD_NODE = {"dev/kfd": ""}
ASCEND_DRIVER = {"usr/local/Ascend/driver/version.info": "Version=24.1.rc3\nInner=V100\n"}
ASCEND_NODES = {"dev/davinci0": "", "dev/davinci1": "", "dev/davinci_manager": ""}


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Build a machine from files; a sound processor and memory are always there."""

    def build(*parts: dict[str, str]) -> Path:
        for files in (PLAIN, *parts):
            for name, text in files.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
        return tmp_path

    return build


def findings(root: Path, versions: dict[str, str] | None = None, **changed: str) -> dict[str, list[Finding]]:
    """Findings by subject for installed ``versions`` (default: good ones), with ``changed`` ones."""
    table = (GOOD if versions is None else versions) | {k.replace("_", "-"): v for k, v in changed.items()}
    out: dict[str, list[Finding]] = {}
    for finding in examine(root, table.get, path="/usr/local/bin"):
        out.setdefault(finding.subject, []).append(finding)
    return out


def only(found: dict[str, list[Finding]], subject: str) -> Finding:
    (finding,) = found[subject]
    return finding


def test_a_sound_machine_without_chips_has_no_complaint(machine: Callable[..., Path]) -> None:
    found = examine(machine(), GOOD.get, path="")
    assert [f for f in found if f.level != "ok"] == []
    assert exit_code(found) == 0


@pytest.mark.parametrize(
    ("name", "seen", "level", "text"),
    [
        ("torch", "2.9.1+cu128", "error", "2.9.1+cu128, too old"),
        ("torch", "2.11.0", "ok", "2.11.0"),
        ("torch", "2.14.0", "warn", "newer than any version tried"),
        ("numpy", "1.25.9", "error", "too old"),
        ("safetensors", "0.5.3", "error", "too old"),
        ("triton", "3.5.1", "error", "too old"),
        ("triton", "3.9.0", "ok", "3.9.0"),
        ("torch-npu", "2.13.0", "ok", "2.13.0"),
    ],
)
def test_versions_are_judged_against_their_windows(
    name: str, seen: str, level: str, text: str, machine: Callable[..., Path]
) -> None:
    finding = only(findings(machine(), GOOD | {name: seen}), name)
    assert finding.level == level
    assert text in finding.seen
    assert bool(finding.remedy) == (level != "ok")


def test_a_required_distribution_that_is_missing_is_an_error_and_an_optional_one_is_not(
    machine: Callable[..., Path],
) -> None:
    found = findings(machine(), {"numpy": "2.0", "safetensors": "0.6"})
    assert only(found, "torch") == Finding("error", "torch", "not installed", 'pip install "torch>=2.11,<2.14"')
    assert only(found, "triton") == Finding("ok", "triton", "not installed (optional)")


def test_torch_npu_must_be_of_torchs_own_version(machine: Callable[..., Path]) -> None:
    _, finding = findings(machine(), torch_npu="2.11.0")["torch-npu"]
    assert finding.level == "error"
    assert finding.seen == "torch-npu 2.11.0 beside torch 2.13.0"


def test_two_distributions_of_one_module_are_an_error(machine: Callable[..., Path]) -> None:
    _, finding = findings(machine(), triton="3.7.1", triton_ascend="3.2.0")["triton"]
    assert finding.level == "error"
    assert finding.seen == "triton 3.7.1, triton-ascend 3.2.0 overwrite each other's module 'triton'"


@pytest.mark.parametrize(("version", "level"), [((3, 10, 9), "error"), ((3, 11, 0), "ok"), ((3, 14, 0), "error")])
def test_python_has_a_window(version: tuple[int, ...], level: str) -> None:
    assert python_finding(version).level == level


def test_the_processor_is_described_by_the_features_worth_knowing(machine: Callable[..., Path]) -> None:
    assert only(findings(machine()), "cpu").seen == "Xeon, 2 processors, amx_bf16 avx512f avx2"
    finding = only(findings(machine({"proc/cpuinfo": "processor : 0\nflags : fpu sse2\n"})), "cpu")
    assert finding.level == "warn"
    assert "AVX2" in finding.remedy


def test_an_arm_processor_is_known_by_its_own_features(machine: Callable[..., Path]) -> None:
    root = machine({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"})
    finding = only(findings(root), "cpu")
    assert finding.level == "ok"
    assert finding.seen.endswith("1 processors, sve bf16 asimd")


def test_a_machine_without_proc_says_that_it_does_not_know(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert (only(found, "cpu").level, only(found, "memory").seen) == ("warn", "not known")


def test_memory_is_limited_by_the_control_group(machine: Callable[..., Path]) -> None:
    assert only(findings(machine()), "memory") == Finding("ok", "memory", "16.0 GiB, 8.0 GiB available")
    finding = only(findings(machine({"sys/fs/cgroup/memory.max": "1073741824\n"})), "memory")
    assert finding.level == "warn"
    assert finding.seen.endswith("control group limit 1.0 GiB")
    machine({"sys/fs/cgroup/memory.max": "max\n"})
    assert only(findings(machine()), "memory").level == "ok"


ROUTES = {
    "NVIDIA driver without nodes": (NVIDIA_DRIVER, "NVIDIA", "error", "no /dev/nvidia0 exists"),
    "NVIDIA nodes without driver": (NVIDIA_NODE, "NVIDIA", "error", "/proc/driver/nvidia/version does not"),
    "NVIDIA card hidden from the container": (
        NVIDIA_DRIVER | NVIDIA_NODE | {"proc/driver/nvidia/gpus/0000:00:07.0/information": H200.format(minor=1)},
        "NVIDIA",
        "warn",
        "lists cards 0, 1, the device nodes are /dev/nvidia0",
    ),
    "AMD node without topology": (AMD_NODE, "AMD", "error", "/sys/class/kfd/kfd/topology does not"),
    "AMD topology without node": (AMD_TOPOLOGY, "AMD", "error", "shows 2 devices, but /dev/kfd does not exist"),
    "AMD topology of processors only": (
        AMD_NODE | {f"{NODES}/0/properties": "simd_count 0\n"},
        "AMD",
        "error",
        "shows no device that computes",
    ),
    "Ascend nodes without driver": (
        ASCEND_NODES,
        "Ascend",
        "error",
        "neither npu-smi nor /usr/local/Ascend/driver does",
    ),
    "Ascend nodes and toolkit without driver": (
        ASCEND_NODES | {"usr/local/Ascend/ascend-toolkit/version.cfg": "8.3"},
        "Ascend",
        "error",
        "neither npu-smi nor /usr/local/Ascend/driver does",
    ),
    "Ascend nodes without manager": (
        ASCEND_DRIVER | {"dev/davinci0": ""},
        "Ascend",
        "error",
        "/dev/davinci_manager does not",
    ),
    "Ascend driver without nodes": (ASCEND_DRIVER, "Ascend", "warn", "(driver 24.1.rc3), but no /dev/davinci0"),
    "Ascend tool on the path without nodes": ({"usr/local/bin/npu-smi": ""}, "Ascend", "warn", "(npu-smi)"),
}


@pytest.mark.parametrize("case", ROUTES)
def test_two_routes_that_disagree_are_a_finding_with_a_remedy(case: str, machine: Callable[..., Path]) -> None:
    files, vendor, level, text = ROUTES[case]
    found = findings(machine(files))
    finding = next(f for f in found[vendor] if f.level != "ok")
    assert (finding.level, text in finding.seen, bool(finding.remedy)) == (level, True, True)
    for other in {"NVIDIA", "AMD", "Ascend"} - {vendor}:
        assert only(found, other).seen.startswith("no device")


def test_an_nvidia_device_seen_by_both_routes(machine: Callable[..., Path]) -> None:
    root = machine(NVIDIA_DRIVER, NVIDIA_NODE)
    (device,) = nvidia(root).devices
    assert (device.index, device.name, device.arch, device.details["uuid"]) == (0, "NVIDIA H200", "sm_90", "GPU-1a2b")
    finding = only(findings(root), "NVIDIA")
    assert finding.seen == "device 0: NVIDIA H200 (sm_90); driver 580.159.04, 1 cards"


def test_the_version_of_the_proprietary_driver_is_read_too(machine: Callable[..., Path]) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n"
    assert nvidia(machine(NVIDIA_NODE, {"proc/driver/nvidia/version": text})).driver == "driver 535.183.01"


def test_amd_devices_have_the_topologys_architecture_and_memory(machine: Callable[..., Path]) -> None:
    first, second = amd(machine(AMD_TOPOLOGY, AMD_NODE)).devices
    assert (first.index, first.arch, first.memory_bytes) == (0, "gfx942", 206141652992)
    assert (second.index, second.arch, second.details["topology"]) == (1, "gfx950", "node 10")


def test_ascend_devices_seen_by_both_routes(machine: Callable[..., Path]) -> None:
    assert [d.index for d in ascend(machine(ASCEND_DRIVER, ASCEND_NODES), "").devices] == [0, 1]


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110000, "gfx1100"), (0, "unknown")]
)
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


@pytest.mark.parametrize(
    ("files", "torch", "seen"),
    [
        (NVIDIA_DRIVER | NVIDIA_NODE, "2.13.0+cpu", "2.13.0+cpu on a machine with NVIDIA devices"),
        (NVIDIA_DRIVER | NVIDIA_NODE, "2.13.0+rocm7.0", "2.13.0+rocm7.0 on a machine with NVIDIA devices"),
        (AMD_TOPOLOGY | AMD_NODE, "2.13.0+cu130", "2.13.0+cu130 on a machine with AMD devices"),
    ],
)
def test_a_build_of_torch_that_cannot_drive_the_device_is_a_warning(
    files: dict[str, str], torch: str, seen: str, machine: Callable[..., Path]
) -> None:
    finding = only(findings(machine(files), torch=torch), "torch build")
    assert (finding.level, finding.seen) == ("warn", seen)


def test_the_right_build_of_torch_is_no_finding(machine: Callable[..., Path]) -> None:
    root = machine(NVIDIA_DRIVER, NVIDIA_NODE)
    assert "torch build" not in findings(root, torch="2.13.0+cu130")
    assert "torch build" not in findings(root)


def test_one_error_decides_the_exit_code() -> None:
    assert exit_code((Finding("ok", "a", "b"), Finding("warn", "a", "b"))) == 0
    assert exit_code((Finding("ok", "a", "b"), Finding("error", "a", "b"))) == 1


def test_versions_compare_by_their_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13)
    assert within("3.10", ">=3.9,<3.11")
    assert not within("3.9.9", ">=3.10")
    assert within("2.13.0+cpu", "==2.13")
    with pytest.raises(ValueError, match=r"version clause '~=3\.6'"):
        within("3.6", "~=3.6")


def test_requirements_are_held_against_what_is_installed() -> None:
    assert unmet("pluggy>=1.0") is None
    assert unmet("pluggy") is None
    assert "needed is pluggy>=99" in str(unmet("pluggy>=99"))
    assert unmet("acme-runtime>=2") == "acme-runtime is not installed, needed is acme-runtime>=2"
    assert "cannot be read" in str(unmet(">=2"))
    assert "version clause" in str(unmet("pluggy~=1.0"))
