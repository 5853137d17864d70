"""Judge this machine from metadata only, before anything can crash: versions, processor, devices, environment.

Nothing here imports torch, a chip's library or a plugin; versions come from ``importlib.metadata`` and everything
else from :mod:`hal.machine`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from hal import machine

Level = Literal["ok", "warn", "error"]
Version = tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One judgement: ``ok``, ``warn`` (works, with a limit) or ``error`` (will not work), what was seen, the remedy."""

    level: Level
    subject: str
    seen: str
    remedy: str = ""


@dataclass(frozen=True)
class Window:
    """Versions of a package known to work: from ``low`` to below ``high``; ``needed_for`` is empty if always needed."""

    package: str
    low: Version
    high: Version
    needed_for: str = ""

    @property
    def text(self) -> str:
        """The window as a requirement: ``torch>=2.11,<2.14``."""
        return f"{self.package}>={_dotted(self.low)},<{_dotted(self.high)}"


PYTHON = Window("python", (3, 11), (3, 14))
WINDOWS = (
    Window("torch", (2, 11), (2, 14)),
    Window("numpy", (1, 26), (3,)),
    Window("safetensors", (0, 6), (1,)),
    Window("triton", (3, 6), (4,), "NVIDIA and AMD"),
    Window("torch_npu", (2, 11), (2, 14), "Ascend"),
)

#: Features that decide which processor kernels run fast, by the names in ``proc/cpuinfo``.
CPU_BASE = ("avx2", "asimd")
CPU_EXTRA = ("avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve")

#: Vendor -> build tags of torch (``2.11.0+TAG``) that can drive its devices.
BUILD_TAGS = {"NVIDIA": "cu", "AMD": "rocm"}


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def parse(version: str) -> Version:
    """The release numbers of a version: ``"2.13.0+cpu"`` -> ``(2, 13, 0)``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def installed(package: str) -> str | None:
    """Version of an installed distribution, or ``None``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def judge_python(version: Sequence[int]) -> Finding:
    """Whether the interpreter's version lies in the window that is tested."""
    seen = _dotted(tuple(version[:3]))
    if PYTHON.low <= tuple(version[:2]) < PYTHON.high:
        return Finding("ok", "python", seen)
    return Finding("error", "python", seen, f"use {PYTHON.text}")


def judge_version(window: Window, seen: str | None) -> Finding:
    """Missing or too old is an error where the package is always needed; newer than known is a warning."""
    if seen is None:
        if window.needed_for:
            return Finding("ok", window.package, f"not installed; only {window.needed_for} devices need it")
        return Finding("error", window.package, "not installed", f"pip install '{window.text}'")
    if parse(seen) < window.low:
        return Finding("error", window.package, f"{seen} is too old", f"pip install '{window.text}'")
    if parse(seen) >= window.high:
        return Finding("warn", window.package, f"{seen} is newer than tested", f"tested are {window.text}")
    return Finding("ok", window.package, seen)


def judge_devices(devices: machine.Devices) -> Finding:
    """Devices by two routes; a disagreement is an error when it hides every device, else a warning."""
    if not devices.agree:
        level: Level = "warn" if devices.usable else "error"
        return Finding(level, f"{devices.vendor} devices", f"the routes disagree: {devices.seen}", devices.remedy)
    if not devices.usable:
        return Finding("ok", f"{devices.vendor} devices", "none")
    names = sorted({f"{d.name} ({d.arch})" for d in devices.usable})
    driver = f", driver {devices.driver}" if devices.driver else ""
    return Finding("ok", f"{devices.vendor} devices", f"{len(devices.usable)} × {', '.join(names)}{driver}")


def judge_libraries(vendor: str, versions: Mapping[str, str | None]) -> tuple[Finding, ...]:
    """What a machine with devices of ``vendor`` needs beyond the base: the right torch build and chip packages."""
    subject = f"{vendor} libraries"
    missing = [w for w in WINDOWS if vendor in w.needed_for and versions.get(w.package) is None]
    out = [Finding("warn", subject, f"{w.package} is not installed", f"pip install '{w.text}'") for w in missing]
    torch, npu = versions.get("torch") or "", versions.get("torch_npu") or ""
    tag, build = BUILD_TAGS.get(vendor, ""), torch.partition("+")[2]
    if tag and build and not build.startswith(tag):
        remedy = f"install a torch build for {vendor} (+{tag}…)"
        out.append(Finding("warn", subject, f"torch {torch} is built for {build}", remedy))
    if vendor == "Ascend" and torch and npu and parse(torch)[:2] != parse(npu)[:2]:
        remedy = f"pip install 'torch_npu=={_dotted(parse(torch)[:2])}.*'"
        out.append(Finding("error", subject, f"torch_npu {npu} beside torch {torch}", remedy))
    return tuple(out)


def judge_cpu(flags: frozenset[str], architecture: str) -> Finding:
    """Which vector and matrix features the processor has."""
    have = [f for f in (*CPU_BASE, *CPU_EXTRA) if f in flags]
    if not flags:
        return Finding("warn", "cpu", f"{architecture}, proc/cpuinfo lists no features", "mount proc, or expect less speed")
    if not any(f in flags for f in CPU_BASE):
        return Finding("warn", "cpu", f"{architecture} without {' or '.join(CPU_BASE)}", "expect a slow cpu backend")
    return Finding("ok", "cpu", f"{architecture}: {' '.join(have)}")


def judge_memory(nbytes: int | None) -> Finding:
    """How much memory a process may use."""
    if nbytes is None:
        return Finding("warn", "memory", "not readable", "mount proc; arenas then need an explicit budget")
    return Finding("ok", "memory", f"{nbytes / 2**30:.1f} GiB")


def judge_plugins(value: str | None) -> Finding:
    """``HAL_PLUGINS``: whether every module that it names can be found (none is imported)."""
    if value is None:
        return Finding("ok", "HAL_PLUGINS", "not set")
    names = [n.strip() for n in value.split(",") if n.strip()]
    if not names:
        return Finding("warn", "HAL_PLUGINS", "set to nothing: no plugin loads", "unset HAL_PLUGINS to load the installed ones")
    missing = [n for n in names if not _findable(n)]
    if missing:
        remedy = "add its source root to PYTHONPATH, or correct the name"
        return Finding("error", "HAL_PLUGINS", f"no module named {', '.join(missing)}", remedy)
    return Finding("ok", "HAL_PLUGINS", ", ".join(names))


def _findable(module: str) -> bool:
    # The top package only: looking further down would import it.
    top = module.partition(".")[0]
    return top.isidentifier() and importlib.util.find_spec(top) is not None


def judge_backend(value: str | None, plugins: str | None, known: Sequence[str]) -> Finding:
    """``HAL_BACKEND``: whether an installed backend has that name; ``known`` are the entry points' names."""
    if value is None or value == "auto" or value in known:
        return Finding("ok", "HAL_BACKEND", value or "not set")
    if value and plugins is not None:
        return Finding("ok", "HAL_BACKEND", f"{value}, to be registered by HAL_PLUGINS")
    return Finding("error", "HAL_BACKEND", repr(value), f"set it to one of {', '.join(('auto', *known))}, or unset it")


def _judge_vendor(find: Callable[[Path], machine.Devices], root: Path, versions: Mapping[str, str | None]) -> list[Finding]:
    devices = find(root)
    return [judge_devices(devices), *(judge_libraries(devices.vendor, versions) if devices.usable else ())]


def examine(root: Path = machine.ROOT) -> tuple[Finding, ...]:
    """Every finding about this machine, in a fixed order; device and processor facts are read under ``root``."""
    versions = {w.package: installed(w.package) for w in WINDOWS}
    plugins, backend = os.environ.get("HAL_PLUGINS"), os.environ.get("HAL_BACKEND")
    known = sorted({e.name for e in metadata.entry_points(group="hal.backends")})
    out = [judge_python(sys.version_info[:3])]
    out += [judge_version(w, versions[w.package]) for w in WINDOWS]
    out += [judge_cpu(machine.cpu_flags(root), platform.machine()), judge_memory(machine.memory_bytes(root))]
    for find in machine.VENDORS.values():
        out += _judge_vendor(find, root, versions)
    return (*out, judge_plugins(plugins), judge_backend(backend, plugins, known))


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when a finding is an error, else 0."""
    return int(any(f.level == "error" for f in findings))
