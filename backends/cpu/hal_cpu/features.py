"""What this host is and what this process may use of it, read from /proc, /sys and the control groups; no torch.

Every reader takes ``root`` so that a test can stand a directory tree in for the machine.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from hal.errors import BackendError, UsageError

ROOT = Path("/")

_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16"}

#: x86 architectures, each with the flags it needs; every one includes those above it.
X86_LEVELS: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset(_V2),
    "x86-64-v3": frozenset(_V3),
    "x86-64-v4": frozenset(_V4),
    "x86-64-avx512-bf16": frozenset(_BF16),
    "amx": frozenset(_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
}


@dataclass(frozen=True)
class CpuFeatures:
    """``name``: model name; ``arch``: best of :data:`X86_LEVELS` or ``"aarch64"``; ``flags``: all flags."""

    name: str
    arch: str
    flags: frozenset[str]


def at_least(arch: str) -> tuple[str, ...]:
    """Every architecture that runs code written for ``arch``: what a claim lists.

    Raises:
        ValueError: ``arch`` is unknown.
    """
    if arch == "aarch64":
        return (arch,)
    levels = list(X86_LEVELS)
    return tuple(levels[levels.index(arch) :])


def _arch(machine: str, flags: frozenset[str]) -> str:
    if machine.lower() not in ("x86_64", "amd64"):
        return {"arm64": "aarch64"}.get(machine.lower(), machine.lower())
    return [level for level, needed in X86_LEVELS.items() if needed <= flags][-1]


def cpu_features(root: Path = ROOT, machine: str | None = None) -> CpuFeatures:
    """Read ``/proc/cpuinfo``: the flags that *every* processor listed has (cores may differ), and the model name."""
    machine = machine or platform.machine()
    path = root / "proc/cpuinfo"
    text = path.read_text() if path.exists() else ""
    fields = [(k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in text.splitlines())]
    sets = [frozenset(v.split()) for k, v in fields if k in ("flags", "Features")]
    flags = frozenset.intersection(*sets) if sets else frozenset()
    names = [v for k, v in fields if k in ("model name", "Hardware")]
    return CpuFeatures(names[0] if names else machine, _arch(machine, flags), flags)


def parse_cpus(text: str) -> frozenset[int]:
    """``"0-3,6"`` -> ``{0, 1, 2, 3, 6}``.

    Raises:
        ValueError: the part that is not ``N`` or ``N-M`` with N <= M.
    """
    out: set[int] = set()
    for part in text.split(","):
        first, dash, last = (p.strip() for p in part.partition("-"))
        ends = (first, last) if dash else (first, first)
        if not all(e.isascii() and e.isdigit() for e in ends) or int(ends[0]) > int(ends[1]):
            raise ValueError(f"{part.strip()!r} is no CPU number or range")
        out.update(range(int(ends[0]), int(ends[1]) + 1))
    return frozenset(out)


def format_cpus(cpus: Collection[int]) -> str:
    """``{0, 1, 2, 3, 6}`` -> ``"0-3,6"``: the inverse of :func:`parse_cpus`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def choose_cpus(affinity: str | None, allowed: frozenset[int]) -> frozenset[int]:
    """The CPUs that ``affinity`` selects among ``allowed``; ``None`` selects them all.

    Raises:
        UsageError: bad syntax, or a CPU that this process may not run on.
    """
    if affinity is None:
        return allowed
    right = f"right is a list such as 0-3,6 of the allowed CPUs {format_cpus(allowed)}"
    try:
        cpus = parse_cpus(affinity)
    except ValueError as e:
        raise UsageError(f"HAL_CPU_AFFINITY={affinity!r}: {e}; {right}") from e
    if not cpus <= allowed:
        raise UsageError(f"HAL_CPU_AFFINITY={affinity!r}: CPUs {format_cpus(cpus - allowed)} are not allowed; {right}")
    return cpus


def check_threads(threads: int, cpus: Collection[int], quota: float | None) -> int:
    """``threads`` if it does not oversubscribe ``cpus`` and the control group's ``quota`` (CPUs, ``None``: no limit).

    Raises:
        UsageError: below 1 or above what is usable.
    """
    usable = usable_cpus(cpus, quota)
    if 1 <= threads <= usable:
        return threads
    limit = f"CPUs {format_cpus(cpus)}" + ("" if quota is None else f", quota {quota:g} CPUs")
    raise UsageError(f"HAL_CPU_THREADS={threads}: right is 1 to {usable} ({limit})")


def usable_cpus(cpus: Collection[int], quota: float | None) -> int:
    """How many threads can run at once on ``cpus`` under ``quota``; at least 1."""
    return len(cpus) if quota is None else max(1, min(len(cpus), math.ceil(quota)))


def parse_threads(text: str) -> int:
    """The value of HAL_CPU_THREADS; UsageError unless a whole number."""
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"HAL_CPU_THREADS={text!r}: right is a whole number from 1")
    return int(text)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and directory of every control group above this process that may limit ``controller``.

    A container sees its own group at the mount's root while /proc names the host's path, hence every prefix of the
    path that exists, the root among them.
    """
    listing = root / "proc/self/cgroup"
    mounts = root / "sys/fs/cgroup"
    for line in listing.read_text().splitlines() if listing.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, bases = 2, (mounts, mounts / "unified")
        elif controller in controllers.split(","):
            version, bases = 1, (mounts / controller, mounts / controllers)
        else:
            continue
        for base in dict.fromkeys(bases):
            for at in (base, *_descend(base, path)):
                yield version, at


def _descend(base: Path, path: str) -> Iterator[Path]:
    for part in path.strip("/").split("/"):
        base = base / part
        if part in ("", "..") or not base.is_dir():
            return
        yield base


def _number(path: Path) -> int | None:
    """The integer in a control file; ``None`` where it is missing or says ``max``."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if text == "max" else int(text)


def _stat(path: Path, key: str) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(v) for k, _, v in (line.partition(" ") for line in lines) if k == key), 0)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, left) in bytes of every control group that limits memory; page cache that can go counts as left."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for version, group in _groups(root, "memory"):
        limit_file, used_file, cache = names[version]
        limit = _number(group / limit_file)
        if limit is None:  # version 1 writes "no limit" as almost 2^63, which is never the least
            continue
        used = (_number(group / used_file) or 0) - _stat(group / "memory.stat", cache)
        yield limit, max(0, limit - max(0, used))


def _meminfo(root: Path, key: str) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise BackendError(f"{path}: {key} is missing; right is a Linux system with /proc mounted")


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still use: the least of MemAvailable and what every control group leaves it."""
    return min(_meminfo(root, "MemAvailable"), *(left for _, left in _memory_limits(root)), 1 << 62)


def total_memory(root: Path = ROOT) -> int:
    """Bytes that this process could ever use: the least of MemTotal and every control group's limit."""
    return min(_meminfo(root, "MemTotal"), *(limit for limit, _ in _memory_limits(root)), 1 << 62)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs that the control groups grant (``1.5`` is one and a half), ``None`` without a limit."""
    quotas = []
    for version, group in _groups(root, "cpu"):
        if version == 2:
            path = group / "cpu.max"
            quota, period = path.read_text().split() if path.exists() else ("max", "0")
        else:
            quota = str(_number(group / "cpu.cfs_quota_us") or "max")
            period = str(_number(group / "cpu.cfs_period_us") or 100_000)
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def last_level_cache(cpus: Collection[int], root: Path = ROOT) -> int:
    """Bytes of the last-level caches that ``cpus`` share, each counted once; 0 where the kernel does not tell."""
    found: dict[str, int] = {}
    for cpu in cpus:
        indices = sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))
        sizes = [(i, _cache_size(i / "size")) for i in indices if (i / "size").exists()]
        if sizes:
            last, size = max(sizes, key=lambda s: s[1])
            found[(last / "shared_cpu_list").read_text().strip()] = size
    return sum(found.values())


def _cache_size(path: Path) -> int:
    text = path.read_text().strip()
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]] if text[-1:] in ("K", "M") else int(text)
