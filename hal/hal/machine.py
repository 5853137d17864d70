"""What chips the machine shows, read by two independent routes from /proc, /dev and /sys; no chip library is touched.

Every reader takes ``root`` so that a test can stand a directory tree in for the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hal.plugin import DeviceInfo, Probe

ROOT = Path("/")

Level = Literal["ok", "warn", "error"]

#: part of the marketing name -> architecture. The driver's files do not tell the architecture itself.
NVIDIA_ARCH = {
    "A100": "sm_80",
    "A800": "sm_80",
    "H100": "sm_90",
    "H200": "sm_90",
    "H800": "sm_90",
    "H20": "sm_90",
    "GH200": "sm_90",
    "B200": "sm_100",
    "GB200": "sm_100",
}


@dataclass(frozen=True)
class Problem:
    """Two routes that disagree: how bad it is, what was seen, what to do."""

    level: Level
    seen: str
    remedy: str


@dataclass(frozen=True)
class Sight:
    """What both routes show of one vendor's chips.

    ``driver`` and ``nodes`` say what either route saw, empty for nothing; ``devices`` are usable by both;
    ``looked_for`` names both routes and ``remedy`` helps where nothing was found.
    """

    vendor: str
    driver: str
    nodes: str
    devices: tuple[DeviceInfo, ...]
    problems: tuple[Problem, ...]
    looked_for: str
    remedy: str

    def probe(self, *limits: str) -> Probe:
        """The sight as a plugin's probe; ``limits`` are further reasons to state where a device is present."""
        problems = tuple(f"{p.seen}; {p.remedy}" for p in self.problems)
        if self.devices:
            return Probe(self.devices, (*problems, *limits))
        return Probe((), problems or (self.absent(),))

    def absent(self) -> str:
        """The reason where neither route shows anything."""
        return f"no {self.vendor} device: {self.looked_for}; {self.remedy}"


def nvidia(root: Path = ROOT) -> Sight:
    """NVIDIA: the kernel driver's files under /proc against the device nodes /dev/nvidia0, /dev/nvidia1, …"""
    version = _text(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", version)
    driver = f"driver {found[1]}" if found else ("driver of unknown version" if version else "")
    cards = dict(_nvidia_cards(root))
    nodes = _numbered(root / "dev", "nvidia")
    devices = tuple(_nvidia_device(i, cards.get(i, {})) for i in nodes) if version else ()
    return Sight(
        "NVIDIA",
        driver + (f", {len(cards)} cards" if cards else ""),
        _listed("/dev/nvidia", nodes),
        devices,
        tuple(_nvidia_problems(bool(version), cards, nodes)),
        "neither /proc/driver/nvidia/version nor /dev/nvidia0 exists",
        "install the driver, or start the container with the devices",
    )


def _nvidia_cards(root: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Device minor -> fields of every card that the driver lists."""
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in _text(path).splitlines())}
        if fields.get("Device Minor", "").isdigit():
            yield int(fields["Device Minor"]), fields


def _nvidia_device(index: int, card: dict[str, str]) -> DeviceInfo:
    name = card.get("Model", "unknown NVIDIA device")
    words = re.findall(r"[A-Z]+\d+", name)
    arch = next((NVIDIA_ARCH[w] for w in words if w in NVIDIA_ARCH), "unknown")
    details = {k: card[f] for k, f in (("pci", "Bus Location"), ("uuid", "GPU UUID")) if f in card}
    return DeviceInfo(index, name, arch, 0, {"node": f"/dev/nvidia{index}", **details})


def _nvidia_problems(driver: bool, cards: dict[int, dict[str, str]], nodes: list[int]) -> Iterator[Problem]:
    listed = _listed("/dev/nvidia", nodes)
    if driver and not nodes:
        remedy = "start the container with the devices, or run nvidia-modprobe -u -c=0"
        yield Problem("error", "the NVIDIA driver is loaded, but no /dev/nvidia0 exists", remedy)
    elif nodes and not driver:
        remedy = "load the driver of this kernel (modprobe nvidia), or mount /proc/driver/nvidia"
        yield Problem("error", f"{listed} exist, but /proc/driver/nvidia/version does not", remedy)
    elif cards and set(nodes) != set(cards):
        seen = f"the NVIDIA driver lists cards {_plain(cards)}, the device nodes are {listed}"
        yield Problem("warn", seen, "give the container the missing devices if you need them")


def amd(root: Path = ROOT) -> Sight:
    """AMD: the node /dev/kfd against the topology under /sys/class/kfd, which also tells architecture and memory."""
    node = (root / "dev/kfd").exists()
    topology = root / "sys/class/kfd/kfd/topology/nodes"
    found = list(_amd_devices(topology))
    devices = tuple(DeviceInfo(i, *facts) for i, facts in enumerate(found)) if node else ()
    return Sight(
        "AMD",
        f"topology with {len(found)} devices" if topology.is_dir() else "",
        "/dev/kfd" if node else "",
        devices,
        tuple(_amd_problems(node, topology.is_dir(), len(found))),
        "neither /dev/kfd nor /sys/class/kfd/kfd/topology exists",
        "install the amdgpu driver, or start the container with --device=/dev/kfd --device=/dev/dri",
    )


def _amd_devices(topology: Path) -> Iterator[tuple[str, str, int, dict[str, str]]]:
    """Name, architecture, bytes and details of every topology node that computes; processors have no SIMD units."""
    nodes = topology.iterdir() if topology.is_dir() else ()
    for node in sorted((n for n in nodes if n.name.isdigit()), key=lambda n: int(n.name)):
        facts = _properties(node / "properties")
        if facts.get("simd_count", 0):
            banks = [_properties(p) for p in node.glob("mem_banks/*/properties")]
            memory = sum(b.get("size_in_bytes", 0) for b in banks if b.get("heap_type") in (1, 2))
            arch = gfx_name(facts.get("gfx_target_version", 0))
            name = f"AMD {_text(node / 'name').strip() or arch}"
            yield name, arch, memory, {"topology": f"node {node.name}"}


def gfx_name(version: int) -> str:
    """The topology's ``gfx_target_version`` as the compiler spells it: ``90402`` -> ``gfx942``, ``90010`` -> ``gfx90a``."""
    if version <= 0:
        return "unknown"
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _amd_problems(node: bool, topology: bool, count: int) -> Iterator[Problem]:
    if node and not topology:
        remedy = "load the amdgpu driver (modprobe amdgpu), or mount /sys"
        yield Problem("error", "/dev/kfd exists, but /sys/class/kfd/kfd/topology does not", remedy)
    elif node and not count:
        remedy = "give the container --device=/dev/dri, and the user the groups video and render"
        yield Problem("error", "/dev/kfd exists, but its topology shows no device that computes", remedy)
    elif count and not node:
        remedy = "start the container with --device=/dev/kfd --device=/dev/dri"
        yield Problem("error", f"the AMD topology shows {count} devices, but /dev/kfd does not exist", remedy)


def ascend(root: Path = ROOT, path: str | None = None) -> Sight:
    """Huawei Ascend: the nodes /dev/davinci0, … and davinci_manager against the installed driver and npu-smi.

    ``path``: the search path for npu-smi, default ``$PATH``; it is looked up below ``root``.
    """
    nodes = _numbered(root / "dev", "davinci")
    manager = (root / "dev/davinci_manager").exists()
    driver = _ascend_driver(root, os.environ.get("PATH", "") if path is None else path)
    usable = nodes if driver and manager else []
    return Sight(
        "Ascend",
        driver,
        _listed("/dev/davinci", nodes),
        tuple(DeviceInfo(i, "Ascend NPU", "unknown", 0, {"node": f"/dev/davinci{i}"}) for i in usable),
        tuple(_ascend_problems(driver, manager, _listed("/dev/davinci", nodes))),
        "none of /dev/davinci0, npu-smi and /usr/local/Ascend/driver exists",
        "install the Ascend driver, or start the container with --device=/dev/davinci0 --device=/dev/davinci_manager",
    )


def _ascend_driver(root: Path, path: str) -> str:
    version = re.search(r"(?m)^Version=(\S+)", _text(root / "usr/local/Ascend/driver/version.info"))
    if version:
        return f"driver {version[1]}"
    for folder in filter(None, path.split(os.pathsep)):
        if (root / folder.lstrip("/") / "npu-smi").is_file():
            return "npu-smi"
    # A toolkit beside it is not enough: images carry one, while the driver is mounted from the host.
    return "driver of unknown version" if any((root / "usr/local/Ascend/driver").glob("*")) else ""


def _ascend_problems(driver: str, manager: bool, nodes: str) -> Iterator[Problem]:
    if nodes and not driver:
        remedy = "install the Ascend driver, or mount /usr/local/Ascend/driver and npu-smi"
        yield Problem("error", f"{nodes} exist, but neither npu-smi nor /usr/local/Ascend/driver does", remedy)
    elif nodes and not manager:
        yield Problem("error", f"{nodes} exist, but /dev/davinci_manager does not", "add --device=/dev/davinci_manager")
    elif driver and not nodes:
        remedy = "start the container with --device=/dev/davinci0, or use another machine to run"
        yield Problem("warn", f"Ascend software is installed ({driver}), but no /dev/davinci0 exists", remedy)


def _text(path: Path) -> str:
    """The file's text; empty where it is missing or the container hides it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _properties(path: Path) -> dict[str, int]:
    """``key value`` lines with whole numbers."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def _numbered(folder: Path, prefix: str) -> list[int]:
    names = (p.name.removeprefix(prefix) for p in folder.glob(f"{prefix}[0-9]*"))
    return sorted(int(n) for n in names if n.isdigit())


def _listed(prefix: str, numbers: list[int]) -> str:
    return ", ".join(f"{prefix}{n}" for n in numbers)


def _plain(numbers: dict[int, dict[str, str]]) -> str:
    return ", ".join(map(str, sorted(numbers)))
