"""Facts about this machine from metadata alone: device nodes, driver tables, the kernel's own files. No torch.

Every function takes the ``root`` under which it reads, so that tests and mounted images are read like a machine. A
file that is missing or not readable is an answer ("not there"), never an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hal.plugin import DeviceInfo, Probe

ROOT = Path("/")
UNKNOWN = "unknown"

#: Words of a model name -> architecture, for the data-centre chips of each generation.
NVIDIA_ARCHES: Mapping[str, tuple[str, ...]] = {
    "sm_80": ("A100", "A800", "A30"),
    "sm_86": ("A10", "A16", "A40"),
    "sm_89": ("L4", "L20", "L40", "L40S"),
    "sm_90": ("H20", "H100", "H200", "H800", "GH200"),
    "sm_100": ("B100", "B200", "GB200"),
    "sm_103": ("B300", "GB300"),
}

AMD_NAMES: Mapping[str, str] = {
    "gfx908": "AMD Instinct MI100",
    "gfx90a": "AMD Instinct MI200 series",
    "gfx942": "AMD Instinct MI300 series",
    "gfx950": "AMD Instinct MI350 series",
}

_VRAM_HEAPS = ("1", "2")
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Route:
    """One way of counting devices: where it looked and how many it found."""

    where: str
    count: int


@dataclass(frozen=True)
class Devices:
    """The devices of one vendor: those that this process can open, the driver, and the two counts behind them.

    ``usable``: one :class:`DeviceInfo` each; ``memory_bytes`` 0 and ``arch`` ``unknown`` where metadata does not tell.
    ``driver``: its version, empty when none was found. ``remedy``: what to do when the routes disagree.
    """

    vendor: str
    driver: str
    usable: tuple[DeviceInfo, ...]
    routes: tuple[Route, Route]
    remedy: str

    @property
    def seen(self) -> str:
        """Both routes in one line."""
        return ", ".join(f"{r.where}: {r.count}" for r in self.routes)

    @property
    def agree(self) -> bool:
        """Whether both routes found the same number."""
        return self.routes[0].count == self.routes[1].count

    def probe(self) -> Probe:
        """What a backend of this vendor reports: the usable devices, or why there is none."""
        if self.usable:
            return Probe(self.usable)
        why = f"no {self.vendor} device ({self.seen})"
        return Probe(reasons=(why if self.agree else f"{why}; {self.remedy}",))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return ""


def _pairs(text: str, separator: str | None = None) -> dict[str, str]:
    """``key<separator>value`` lines as a mapping; later lines do not replace earlier ones."""
    out: dict[str, str] = {}
    for line in text.splitlines():
        key, *rest = line.split(separator, 1)
        if rest:
            out.setdefault(key.strip(), rest[0].strip())
    return out


def _node_numbers(root: Path, stem: str) -> tuple[int, ...]:
    """Numbers of the device nodes ``dev/<stem><number>``, ascending."""
    found = (p.name.removeprefix(stem) for p in (root / "dev").glob(f"{stem}[0-9]*"))
    return tuple(sorted(int(n) for n in found if n.isdecimal()))


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Feature flags of the first processor in ``proc/cpuinfo`` (``flags`` on x86, ``Features`` on Arm)."""
    facts = _pairs(_read(root / "proc/cpuinfo"), ":")
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def memory_bytes(root: Path = ROOT) -> int | None:
    """Bytes that a process here may use: ``MemTotal`` or the control group's limit, whichever is lower."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [int(found[1]) * 1024] if found else []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(root / "sys/fs/cgroup" / name).strip()
        # Version 1 writes "no limit" as a number near 2^63, version 2 as the word max.
        if text.isdecimal() and int(text) < _NO_LIMIT:
            limits.append(int(text))
    return min(limits, default=None)


def nvidia_arch(model: str) -> str:
    """``"NVIDIA H200"`` -> ``"sm_90"``; ``unknown`` for a model that the table does not list."""
    words = set(re.split(r"[\s\-]+", model))
    return next((arch for arch, names in NVIDIA_ARCHES.items() if words & set(names)), UNKNOWN)


def nvidia_devices(root: Path = ROOT) -> Devices:
    """NVIDIA devices by the driver's table (``proc/driver/nvidia``) and by nodes (``dev/nvidia<minor>``).

    A device is usable when its node is there; the table describes it.
    """
    tables = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    listed = {int(t.get("Device Minor", -1)): t for t in (_pairs(_read(p), ":") for p in tables)}
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read(root / "proc/driver/nvidia/version"))
    minors = _node_numbers(root, "nvidia")
    return Devices(
        "NVIDIA",
        version[1] if version else "",
        tuple(_nvidia_device(i, minor, listed.get(minor, {})) for i, minor in enumerate(minors)),
        (Route("proc/driver/nvidia/gpus", len(tables)), Route("dev/nvidia*", len(minors))),
        "load the nvidia kernel module (nvidia-modprobe), or give the container every device (--gpus all)",
    )


def _nvidia_device(index: int, minor: int, table: Mapping[str, str]) -> DeviceInfo:
    model = table.get("Model", "")
    details = {"node": f"/dev/nvidia{minor}"}
    details |= {k: table[k] for k in ("GPU UUID", "Bus Location", "GPU Firmware") if k in table}
    return DeviceInfo(index, model or "NVIDIA device of unknown model", nvidia_arch(model), 0, details)


def gfx_name(version: int) -> str:
    """``gfx_target_version`` of the kernel driver as an architecture: ``90402`` -> ``"gfx942"``."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def amd_devices(root: Path = ROOT) -> Devices:
    """AMD devices by the kernel driver's topology (``sys/class/kfd``) and by nodes (``dev/kfd``, ``dev/dri``).

    A device is usable when ``dev/kfd`` and its own render node are there. Processors in the topology do not count.
    """
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    tables = [(p.parent, _pairs(_read(p))) for p in sorted(nodes, key=lambda p: (len(p.parent.name), p.parent.name))]
    listed = [(folder, t) for folder, t in tables if int(t.get("gfx_target_version", 0))]
    gate = (root / "dev/kfd").exists()
    open_ = [(f, t) for f, t in listed if gate and _render_node(root, t)]
    return Devices(
        "AMD",
        _read(root / "sys/module/amdgpu/version").strip(),
        tuple(_amd_device(i, folder, t) for i, (folder, t) in enumerate(open_)),
        (
            Route("sys/class/kfd/kfd/topology/nodes", len(listed)),
            Route("dev/kfd with dev/dri/renderD*", len(open_) if listed else int(gate)),
        ),
        "load the amdgpu kernel module, or give the container its nodes (--device /dev/kfd --device /dev/dri)",
    )


def _render_node(root: Path, table: Mapping[str, str]) -> bool:
    minor = table.get("drm_render_minor", "")
    return not minor or (root / f"dev/dri/renderD{minor}").exists()


def _amd_device(index: int, folder: Path, table: Mapping[str, str]) -> DeviceInfo:
    arch = gfx_name(int(table["gfx_target_version"]))
    banks = [_pairs(_read(p)) for p in folder.glob("mem_banks/*/properties")]
    memory = sum(int(b.get("size_in_bytes", 0)) for b in banks if b.get("heap_type") in _VRAM_HEAPS)
    details = {"topology": folder.name}
    details |= {k: table[k] for k in ("device_id", "location_id", "drm_render_minor") if k in table}
    return DeviceInfo(index, AMD_NAMES.get(arch, f"AMD {arch}"), arch, memory, details)


def ascend_devices(root: Path = ROOT) -> Devices:
    """Huawei Ascend devices by nodes (``dev/davinci<number>``) and by the installed driver's files.

    The driver's files do not list devices, so the second route counts every node when the driver is there and none
    when it is not; without the driver no device is usable. Metadata tells neither model nor memory.
    """
    numbers = _node_numbers(root, "davinci")
    driver = root / "usr/local/Ascend/driver"
    version = _pairs(_read(driver / "version.info"), "=").get("Version", "")
    installed = bool(version) or (driver / "lib64").is_dir()
    usable = numbers if installed else ()
    return Devices(
        "Ascend",
        version,
        tuple(
            DeviceInfo(i, "Huawei Ascend NPU", UNKNOWN, 0, {"node": f"/dev/davinci{n}"}) for i, n in enumerate(usable)
        ),
        (
            Route("dev/davinci*", len(numbers)),
            Route("usr/local/Ascend/driver", len(numbers) or 1 if installed else 0),
        ),
        "install the Ascend driver, or give the container both (--device /dev/davinci<n>, -v /usr/local/Ascend/driver)",
    )


VENDORS: Mapping[str, Callable[[Path], Devices]] = {
    "NVIDIA": nvidia_devices,
    "AMD": amd_devices,
    "Ascend": ascend_devices,
}
