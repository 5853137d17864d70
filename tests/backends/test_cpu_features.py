"""What the CPU backend reads of a machine, proved on directory trees that stand for machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.errors import BackendError, UsageError
from hal_cpu import features

GIB = 1 << 30
V3 = "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3 xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A directory tree that stands for a machine."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# Features


@pytest.mark.parametrize(
    ("flags", "arch"),
    [
        ("sse2", "x86-64"),
        ("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3", "x86-64-v2"),
        (V3, "x86-64-v3"),
        (V3.replace("fma ", ""), "x86-64-v2"),
        (V3 + " avx512f", "x86-64-v3"),
        (V4, "x86-64-v4"),
        (V4 + " avx512_bf16", "x86-64-avx512-bf16"),
        (V4 + " avx512_bf16 amx_tile amx_bf16", "x86-64-avx512-bf16"),
        (V4 + " avx512_bf16 amx_tile amx_bf16 amx_int8", "amx"),
    ],
)
def test_the_architecture_is_the_best_whose_flags_are_all_there(tmp_path: Path, flags: str, arch: str) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some Chip\nflags\t\t: {flags}\n"})
    cpu = features.cpu_features(root, "x86_64")
    assert (cpu.name, cpu.arch, cpu.flags) == ("Some Chip", arch, frozenset(flags.split()))


def test_a_flag_that_one_processor_lacks_does_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": f"flags : {V4}\n\nflags : {V3}\n"})
    assert features.cpu_features(root, "x86_64").arch == "x86-64-v3"


@pytest.mark.parametrize("name", ["aarch64", "arm64"])
def test_arm_is_one_architecture_with_its_features_as_flags(tmp_path: Path, name: str) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16 i8mm\n"})
    cpu = features.cpu_features(root, name)
    assert (cpu.arch, cpu.flags) == ("aarch64", frozenset({"fp", "asimd", "bf16", "i8mm"}))


def test_a_machine_without_cpuinfo_gets_the_least_architecture(tmp_path: Path) -> None:
    assert features.cpu_features(tmp_path, "x86_64") == features.CpuFeatures("x86_64", "x86-64", frozenset())


def test_code_for_an_architecture_runs_on_it_and_on_those_above() -> None:
    assert features.at_least("x86-64-v4") == ("x86-64-v4", "x86-64-avx512-bf16", "amx")
    assert features.at_least("aarch64") == ("aarch64",)
    with pytest.raises(ValueError, match="sparc"):
        features.at_least("sparc")


# Affinity and threads


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3,6", {0, 1, 2, 3, 6}), (" 2 , 4 - 5 ", {2, 4, 5}), ("3-3", {3}), ("1,1-2", {1, 2})],
)
def test_cpu_lists_are_read(text: str, cpus: set[int]) -> None:
    assert features.parse_cpus(text) == cpus
    assert features.parse_cpus(features.format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["", ",", "a", "3-1", "1-", "-1", "0-3,", "1-2-3", "0x1", "1.0", "²"])
def test_a_bad_cpu_list_names_variable_value_and_the_right_form(text: str) -> None:
    with pytest.raises(UsageError) as e:
        features.choose_cpus(text, frozenset({0, 1, 2, 5}))
    for part in (f"HAL_CPU_AFFINITY={text!r}", "is no CPU number or range", "right is a list", "0-2,5"):
        assert part in str(e.value)


def test_a_cpu_that_this_process_may_not_use_is_refused() -> None:
    with pytest.raises(UsageError, match=r"HAL_CPU_AFFINITY='0-3': CPUs 2-3 are not allowed; .*CPUs 0-1"):
        features.choose_cpus("0-3", frozenset({0, 1}))


@pytest.mark.parametrize(("threads", "quota"), [(0, None), (-1, None), (5, None), (3, 1.5)])
def test_threads_beyond_cpus_or_quota_are_refused(threads: int, quota: float | None) -> None:
    most = 4 if quota is None else 2
    with pytest.raises(UsageError, match=rf"HAL_CPU_THREADS={threads}: right is 1 to {most} \(CPUs 0-3"):
        features.check_threads(threads, frozenset(range(4)), quota)
    assert features.check_threads(most, frozenset(range(4)), quota) == most


# Memory, quota and caches

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"


def v1(group: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    """Control files of a version 1 memory group; its directory must be seen from this process."""
    base = f"sys/fs/cgroup/memory{group}"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{used}\n",
        f"{base}/memory.stat": f"cache 1\ntotal_inactive_file {cache}\n",
    }


def v2(group: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    """Control files of a version 2 group."""
    base = f"sys/fs/cgroup{group}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        pytest.param({}, 8, 16, id="no-groups"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8, 16, id="no-limits"),
        pytest.param({"proc/self/cgroup": "0::/a\n"} | v2("/a", "max", 5 * GIB), 8, 16, id="v2-max"),
        pytest.param({"proc/self/cgroup": "0::/a\n"} | v2("/a", str(4 * GIB), GIB), 3, 4, id="v2"),
        pytest.param({"proc/self/cgroup": "0::/a\n"} | v2("/a", str(4 * GIB), 3 * GIB, 2 * GIB), 3, 4, id="v2-cache"),
        pytest.param({"proc/self/cgroup": "0::/a\n"} | v2("/a", str(4 * GIB), 5 * GIB), 0, 4, id="v2-over"),
        pytest.param({"proc/self/cgroup": "0::/a/b\n"} | v2("/a", str(GIB), 0) | v2("/a/b", "max", 0), 1, 1, id="up"),
        pytest.param({"proc/self/cgroup": "0::/host/path\n"} | v2("", str(2 * GIB), GIB), 1, 2, id="v2-container"),
        pytest.param({"proc/self/cgroup": "0::/../x\n"} | v2("", str(2 * GIB), GIB), 1, 2, id="v2-outside"),
        pytest.param({"proc/self/cgroup": "4:memory:/a\n"} | v1("/a", 4 * GIB, GIB), 3, 4, id="v1"),
        pytest.param({"proc/self/cgroup": "4:memory:/a\n"} | v1("/a", 4 * GIB, 3 * GIB, GIB), 2, 4, id="v1-cache"),
        pytest.param({"proc/self/cgroup": "4:memory:/a\n"} | v1("/a", (1 << 63) - 4096, GIB), 8, 16, id="v1-none"),
        pytest.param({"proc/self/cgroup": "4:memory:/host\n"} | v1("", 2 * GIB, GIB), 1, 2, id="v1-container"),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/a\n0::/b\n"} | v1("/a", 6 * GIB, GIB) | v2("/unified/b", str(3 * GIB), GIB),
            2, 3, id="both-the-smaller",
        ),
    ],
)  # fmt: skip
def test_memory_is_the_least_of_system_and_groups(tmp_path: Path, files: dict[str, str], free: int, total: int) -> None:
    root = machine(tmp_path, {"proc/meminfo": MEMINFO} | files)
    assert (features.free_memory(root), features.total_memory(root)) == (free * GIB, total * GIB)


def test_a_system_without_meminfo_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="proc/meminfo: MemAvailable is missing"):
        features.free_memory(tmp_path)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, None),
        ({}, None),
    ],
)
def test_the_processor_quota_is_read(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert features.cpu_quota(machine(tmp_path, files)) == quota
    assert features.usable_cpus(range(8), quota) == {None: 8, 1.5: 2, 0.5: 1}[quota]


def test_a_last_level_cache_that_cpus_share_counts_once(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        base = f"sys/devices/system/cpu/cpu{cpu}/cache"
        files |= {f"{base}/index0/size": "32K\n", f"{base}/index0/shared_cpu_list": f"{cpu}\n"}
        files |= {f"{base}/index3/size": "16M\n", f"{base}/index3/shared_cpu_list": f"{shared}\n"}
    root = machine(tmp_path, files)
    assert features.last_level_cache({0, 1}, root) == 16 << 20
    assert features.last_level_cache({0, 1, 2}, root) == 32 << 20
    assert features.last_level_cache({9}, root) == 0
