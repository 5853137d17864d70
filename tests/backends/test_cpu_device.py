"""The CPU device on this machine and on fake ones: what it reads, what it refuses, what two real processes exchange."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.contract import dtype_name
from hal.device import ALIGNMENT
from hal.errors import ContractError, MemoryLimitError, UsageError
from hal_cpu import ceilings, features
from hal_cpu.device import CpuDevice

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _restore_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads are a property of the process: put them back; the caller's variables do not reach the tests."""
    monkeypatch.delenv("HAL_CPU_THREADS", raising=False)
    monkeypatch.delenv("HAL_CPU_AFFINITY", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def python(code: str, **env: str) -> Any:
    """Run ``code`` in a new process and return the JSON that it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_CPU_", "OMP_", "MKL_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_features_import_no_torch() -> None:
    assert python("import sys, json, hal_cpu.features; print(json.dumps('torch' in sys.modules))") is False


# Affinity and threads


@pytest.mark.parametrize("text", ["two", "-1", "1.5", " "])
def test_a_thread_variable_that_is_no_number_names_itself(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CPU_THREADS", text)
    with pytest.raises(UsageError, match=rf"HAL_CPU_THREADS='{text}': right is a whole number"):
        CpuDevice()


def test_variables_bind_every_thread_of_the_process_when_the_device_is_created() -> None:
    cpu = max(features.allowed_cpus())
    code = """
import json, os, torch
from pathlib import Path
(torch.ones(512, 512) @ torch.ones(512, 512)).sum()  # starts the workers that a later binding must reach
from hal_cpu.device import CpuDevice
facts = CpuDevice().facts()
bound = [sorted(os.sched_getaffinity(int(t.name))) for t in Path("/proc/self/task").iterdir()]
print(json.dumps([torch.get_num_threads(), facts.compute_units, facts.details["cpus"], bound]))
"""
    threads, units, cpus, bound = python(code, HAL_CPU_AFFINITY=str(cpu), HAL_CPU_THREADS="1")
    assert (threads, units, cpus) == (1, 1, str(cpu))
    assert all(b == [cpu] for b in bound)


def test_an_inherited_number_of_threads_is_lowered_to_the_cpus_allowed() -> None:
    cpu = min(features.allowed_cpus())
    code = f"""
import os, json, torch
os.sched_setaffinity(0, {{{cpu}}})
torch.set_num_threads(7)
from hal_cpu.device import CpuDevice
print(json.dumps(CpuDevice().facts().compute_units))
"""
    assert python(code) == 1


def test_a_refused_configuration_changes_nothing() -> None:
    device = CpuDevice()
    before = (torch.get_num_threads(), features.allowed_cpus(), device.facts())
    with pytest.raises(UsageError, match="HAL_CPU_THREADS"):
        device.configure(threads=10_000, affinity=str(min(features.allowed_cpus())))
    assert (torch.get_num_threads(), features.allowed_cpus(), device.facts()) == before


# Memory


def test_this_machine_has_free_memory_below_its_total() -> None:
    device = CpuDevice()
    assert 0 < device.free_bytes() < device.facts().memory_bytes


@pytest.mark.parametrize("nbytes", [0, 1, ALIGNMENT, 1_000_003])
def test_allocations_are_aligned_bytes(nbytes: int) -> None:
    buffer = CpuDevice().allocate(nbytes)
    assert (buffer.dtype, tuple(buffer.shape), buffer.device.type) == (torch.uint8, (nbytes,), "cpu")
    assert nbytes == 0 or buffer.data_ptr() % ALIGNMENT == 0


def test_memory_allocated_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        buffer = CpuDevice().allocate(8)
    assert buffer.fill_(1).sum().item() == 8


def test_a_request_the_system_would_grant_is_refused_when_less_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    monkeypatch.setattr(features, "free_memory", lambda: 1 << 20)
    with pytest.raises(MemoryLimitError) as e:
        device.allocate(1 << 20)
    assert str(e.value) == "cpu: 1.00 MiB needed, 1.00 MiB free"
    assert device.allocate((1 << 20) - ALIGNMENT).numel() == (1 << 20) - ALIGNMENT


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ContractError, match="-1 bytes"):
        CpuDevice().allocate(-1)


def test_a_refusal_of_the_system_itself_is_a_memory_error_too() -> None:
    device, limits = CpuDevice(), resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (32 << 20), limits[1]))
    try:
        with pytest.raises(MemoryLimitError, match=r"cpu: 256.00 MiB needed, .* free, the system refused: "):
            device.allocate(256 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Streams, events, graphs, random state


def test_events_measure_time_and_are_always_done() -> None:
    device = CpuDevice()
    start, end = device.event(timing=True), device.event(timing=True)
    start.record()
    end.record(device.stream())
    end.wait()
    assert end.query()
    assert start.elapsed_ms(end) >= 0
    assert start.elapsed_ms(end) == -end.elapsed_ms(start)


def test_events_without_time_say_what_is_missing() -> None:
    device = CpuDevice()
    timed, plain, never = device.event(timing=True), device.event(), device.event(timing=True)
    timed.record()
    plain.record()
    with pytest.raises(ContractError, match=r"without timing; right is event\(timing=True\)"):
        timed.elapsed_ms(plain)
    with pytest.raises(ContractError, match="never recorded"):
        timed.elapsed_ms(never)
    with pytest.raises(ContractError, match="elapsed_ms to a object"):
        timed.elapsed_ms(object())  # type: ignore[arg-type]


def test_streams_nest_and_the_outer_one_returns() -> None:
    device = CpuDevice()
    outer, inner, default = device.stream(), device.stream(), device.current_stream()
    with outer:
        with inner, outer:
            assert device.current_stream() is outer
        assert device.current_stream() is outer
        with inner:
            assert device.current_stream() is inner
    assert device.current_stream() is default
    assert outer is not inner


def test_graphs_are_refused_with_the_reason() -> None:
    device = CpuDevice()
    assert device.supports_graphs is False
    with pytest.raises(ContractError, match="no device graphs"):
        device.graph(lambda: None)


def test_random_state_repeats_what_followed_it() -> None:
    device = CpuDevice()
    state = device.random_state()
    first = torch.rand(4)
    device.set_random_state(state)
    assert torch.equal(torch.rand(4), first)


# Ceilings


def test_ceilings_are_measured_once_per_configuration_within_their_budget() -> None:
    device = CpuDevice()
    first = device.ceilings()
    assert list(first.matrix_flops) == ["float32", "bfloat16", "int8"]
    assert 1e8 < first.read_bytes_per_s < 1e14
    assert 1e8 < first.copy_bytes_per_s < 1e14
    assert all(1e8 < rate < 1e16 for rate in first.matrix_flops.values())
    assert first.seconds < 10  # 3 s on an idle machine; this one may be shared
    assert device.ceilings() is first
    device.configure(threads=1)
    assert device.ceilings() is not first


def test_a_narrow_dtype_is_not_rated_below_a_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"float32": 5.0, "bfloat16": 2.0, "int8": 9.0}
    monkeypatch.setattr(ceilings, "matrix_rate", lambda dtype: measured[dtype_name(dtype)])
    assert ceilings.matrix_rates() == {"float32": 5.0, "bfloat16": 5.0, "int8": 9.0}


@pytest.mark.parametrize(
    ("cache", "free", "nbytes"),
    [(0, 64 * GIB, 64 << 20), (32 << 20, 64 * GIB, 128 << 20), (GIB, 64 * GIB, GIB), (32 << 20, GIB // 2, 64 << 20)],
)
def test_the_bandwidth_buffer_exceeds_the_cache_within_its_limits(cache: int, free: int, nbytes: int) -> None:
    assert ceilings.buffer_bytes(cache, free) == nbytes


def test_the_median_call_counts_and_the_first_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr("hal_cpu.ceilings.time.perf_counter", lambda: next(ticks))
    calls: list[int] = []
    assert ceilings.seconds_per_call(lambda: calls.append(1), budget_s=100.0, repeats=3) == 2.0
    assert len(calls) == 4


# Collectives: two real processes

RANK = """
import json, sys, torch
from hal.device import Collective
from hal.errors import HalError
from hal_cpu.device import CpuDevice
rank, init = int(sys.argv[1]), sys.argv[2]
group = CpuDevice().collective(2, rank, init, timeout_s=20.0)
"""

EXCHANGE = (
    RANK
    + """
total = torch.tensor([1.0, 10.0]) * (rank + 1)
group.all_reduce(total)
most = torch.tensor([rank, -rank])
group.all_reduce(most, "max")
gathered = group.all_gather(torch.tensor([[rank, 2], [3, 4]], dtype=torch.int64).t())
narrow = group.all_gather(torch.tensor([rank + 0.5]).to(torch.float8_e4m3fn))
sent = group.all_to_all(torch.tensor([10 * rank, 10 * rank + 1], dtype=torch.bfloat16))
told = torch.tensor([rank + 7], dtype=torch.int32)
group.broadcast(told, 1)
group.barrier()
refused = []
for call in (
    lambda: group.all_to_all(torch.zeros(3)),
    lambda: group.all_reduce(torch.zeros(2), "mean"),
    lambda: group.all_reduce(torch.zeros(4)[::2]),
    lambda: group.broadcast(torch.zeros(4)[::2], 0),
    lambda: group.broadcast(torch.zeros(4), 2),
):
    try:
        call()
    except HalError as e:
        refused.append(str(e))
again = None
try:
    CpuDevice().collective(2, rank, init)
except HalError as e:
    again = str(e)
out = [t.tolist() for t in (total, most, gathered, narrow.float(), sent.float(), told)]
print(json.dumps([isinstance(group, Collective), group.rank, group.world_size, out, str(narrow.dtype), refused, again]))
group.close()
"""
)

REFUSED = [
    "collective all_to_all: shape [3], right is [2, ...]",
    "collective all_reduce: op 'mean' is none of sum, max, min",
    "collective all_reduce: strides [2], right is contiguous: it is written in place",
    "collective broadcast: strides [2], right is contiguous: it is written in place",
    "collective broadcast: source 2, right is 0 to 1",
]

LOST = (
    RANK
    + """
group.barrier()
if rank == 1:
    import os
    os._exit(0)
try:
    group.all_reduce(torch.ones(4))
except HalError as e:
    print(json.dumps([type(e).__name__, str(e)]))
"""
)


def ranks(code: str, init: str) -> list[Any]:
    """Run ``code`` as ranks 0 and 1 in two processes; the JSON of each, ``None`` where it printed nothing."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HAL_CPU_")}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    processes = [subprocess.Popen([*command, str(r), init], **pipes) for r in range(2)]
    outs = []
    for p in processes:
        out, err = p.communicate(timeout=60)
        assert p.returncode == 0, err
        outs.append(json.loads(out) if out else None)
    return outs


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_two_processes_exchange_tensors_of_every_width(tmp_path: Path) -> None:
    expected = [[3.0, 30.0], [1, 0], [[[0, 3], [2, 4]], [[1, 3], [2, 4]]], [[0.5], [1.5]]]
    for rank, result in enumerate(ranks(EXCHANGE, f"file://{tmp_path}/meet")):
        is_collective, seen_rank, world_size, values, dtype, refused, again = result
        assert (is_collective, seen_rank, world_size, dtype) == (True, rank, 2, "torch.float8_e4m3fn")
        assert values == [*expected, [rank, 10 + rank], [8]]
        assert refused == REFUSED
        assert again == "collective: this process is already in a group; close it first"


def test_a_lost_rank_is_an_error_that_names_method_rank_and_address() -> None:
    first, second = ranks(LOST, f"tcp://127.0.0.1:{free_port()}")
    assert second is None
    kind, message = first
    assert kind == "BackendError"
    assert message.startswith("collective all_reduce: rank 0 of 2 (gloo, tcp://127.0.0.1:")
