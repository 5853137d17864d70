"""Judge the machine from metadata alone, before anything can crash: versions, processor, memory, chips by two routes.

Nothing is imported that could touch a device. Every reader takes ``root``, so that a test can stand a directory tree in
for the machine, and ``version`` in place of the installed distributions.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hal.machine import ROOT, Level, Sight, amd, ascend, nvidia
from hal.versions import installed, release, unmet, within

if TYPE_CHECKING:
    from hal.plugins import Backend

VersionOf = Callable[[str], str | None]

PYTHON = ">=3.11,<3.14"


@dataclass(frozen=True)
class Window:
    """Known-good versions of a distribution: below ``least`` it fails, from ``untested`` on nobody has tried."""

    least: str
    untested: str
    required: bool


WINDOWS = {
    "torch": Window("2.11", "2.14", required=True),
    "numpy": Window("1.26", "3", required=True),
    "safetensors": Window("0.6", "1", required=True),
    "triton": Window("3.6", "3.10", required=False),
    "torch-npu": Window("2.11", "2.14", required=False),
}

#: Distributions that all install a module called ``triton``: at most one may be there.
TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-ascend")

#: Processor flags worth knowing, fastest first, by machine.
CPU_FLAGS = {
    "x86": ("amx_bf16", "avx512_bf16", "avx512f", "avx2"),
    "arm": ("sve2", "sve", "bf16", "asimd"),
}

LOW_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class Finding:
    """One judgement: ``level``, what it is about, what was seen, and what to do (empty where all is well)."""

    level: Level
    subject: str
    seen: str
    remedy: str = ""


def examine(root: Path = ROOT, version: VersionOf = installed, path: str | None = None) -> tuple[Finding, ...]:
    """Every finding about this machine; ``path`` is the search path for vendor tools, default ``$PATH``."""
    sights = (nvidia(root), amd(root), ascend(root, path))
    return (
        python_finding(sys.version_info[:3]),
        *(_distribution(name, version(name)) for name in WINDOWS),
        *_pairs(version),
        _cpu(root),
        _memory(root),
        *(f for sight in sights for f in _chips(sight)),
        *_builds(version("torch"), sights),
    )


def python_finding(version: tuple[int, ...]) -> Finding:
    """Judge the Python version against :data:`PYTHON`."""
    seen = ".".join(map(str, version))
    if within(seen, PYTHON):
        return Finding("ok", "python", seen)
    return Finding("error", "python", seen, f"use Python {PYTHON}")


def _distribution(name: str, seen: str | None) -> Finding:
    window = WINDOWS[name]
    right = f">={window.least},<{window.untested}"
    if seen is None:
        if window.required:
            return Finding("error", name, "not installed", f'pip install "{name}{right}"')
        return Finding("ok", name, "not installed (optional)")
    if within(seen, f"<{window.least}"):
        return Finding("error", name, f"{seen}, too old", f'pip install "{name}{right}"')
    if within(seen, f">={window.untested}"):
        return Finding("warn", name, f"{seen}, newer than any version tried", f"if something fails, use {name}{right}")
    return Finding("ok", name, seen)


def _pairs(version: VersionOf) -> Iterator[Finding]:
    """Distributions that must fit each other."""
    torch, npu = version("torch"), version("torch-npu")
    if torch and npu and release(torch)[:2] != release(npu)[:2]:
        seen = f"torch-npu {npu} beside torch {torch}"
        yield Finding("error", "torch-npu", seen, "install the torch-npu of torch's own major and minor version")
    tritons = [f"{name} {v}" for name in TRITONS if (v := version(name))]
    if len(tritons) > 1:
        yield Finding(
            "error",
            "triton",
            f"{', '.join(tritons)} overwrite each other's module 'triton'",
            "keep one of them; use one virtual environment for each chip",
        )


def _cpu(root: Path) -> Finding:
    fields = list(_fields(root / "proc/cpuinfo"))
    flags = {flag for key, value in fields if key in ("flags", "Features") for flag in value.split()}
    model = next((v for k, v in fields if k in ("model name", "Hardware")), platform.processor() or platform.machine())
    count = sum(k == "processor" for k, _ in fields)
    if not flags:
        return Finding("warn", "cpu", f"{model}, features not known", "mount /proc to have them judged")
    family = "arm" if "asimd" in flags or "fp" in flags else "x86"
    known = [f for f in CPU_FLAGS[family] if f in flags]
    seen = f"{model}, {count} processors, {' '.join(known) or 'no vector extension known here'}"
    if family == "x86" and "avx2" not in flags:
        return Finding(
            "warn", "cpu", seen, "expect slow kernels: use a processor, or a virtual machine type, with AVX2"
        )
    return Finding("ok", "cpu", seen)


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    text = path.read_text(errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _memory(root: Path) -> Finding:
    fields = {k: int(v.split()[0]) * 1024 for k, v in _fields(root / "proc/meminfo") if re.match(r"\d+ kB", v)}
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return Finding("warn", "memory", "not known", "mount /proc to have it judged")
    limit = _memory_limit(root)
    usable = min(fields["MemAvailable"], limit or fields["MemAvailable"])
    seen = f"{_gib(fields['MemTotal'])}, {_gib(fields['MemAvailable'])} available"
    seen += f", control group limit {_gib(limit)}" if limit else ""
    if usable < LOW_MEMORY_BYTES:
        return Finding("warn", "memory", seen, f"free some: below {_gib(LOW_MEMORY_BYTES)} only tiny models fit")
    return Finding("ok", "memory", seen)


def _memory_limit(root: Path) -> int | None:
    """Bytes that the control group at the mount's root allows (version 2, then 1); ``None`` without a limit."""
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (root / name).read_text().strip() if (root / name).is_file() else ""
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes "no limit" as almost 2^63
            return int(text)
    return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


def _chips(sight: Sight) -> Iterator[Finding]:
    for problem in sight.problems:
        yield Finding(problem.level, sight.vendor, problem.seen, problem.remedy)
    if sight.devices:
        devices = "; ".join(f"device {d.index}: {d.name} ({d.arch})" for d in sight.devices)
        yield Finding("ok", sight.vendor, f"{devices}; {sight.driver}")
    elif not sight.problems:
        yield Finding("ok", sight.vendor, f"no device: {sight.looked_for}")


def _builds(torch: str | None, sights: tuple[Sight, ...]) -> Iterator[Finding]:
    """A torch build that cannot drive a device that is here; the build is the version's local label."""
    build = (torch or "").partition("+")[2]
    present = {s.vendor for s in sights if s.devices}
    for vendor, others, right in (("NVIDIA", ("cpu", "rocm", "xpu"), "CUDA"), ("AMD", ("cpu", "cu", "xpu"), "ROCm")):
        if vendor in present and build.startswith(others):
            seen = f"{torch} on a machine with {vendor} devices"
            yield Finding("warn", "torch build", seen, f"install the {right} build of torch to use them")


def judge_backend(backend: Backend) -> Finding:
    """Judge one loaded plugin: broken is an error, and so is a device whose libraries are missing."""
    subject = f"backend {backend.name}"
    if backend.state == "broken":
        return Finding("error", subject, backend.why(), f"run hal backends {backend.name}; repair or uninstall it")
    missing = [u for r in (backend.info.stands_on if backend.info else ()) if (u := unmet(r))]
    if backend.state == "ready" and missing and not backend.designed_for:
        return Finding("error", subject, "; ".join(missing), f'pip install "hal-v4-{backend.name}[chip]"')
    return Finding("ok", subject, "designed for its chip only" if backend.designed_for else backend.state)


def exit_code(findings: tuple[Finding, ...]) -> int:
    """0 without a finding of level error, else 1."""
    return int(any(f.level == "error" for f in findings))
