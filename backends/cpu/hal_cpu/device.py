"""Device services of the CPU: everything runs in order, when called, on the CPUs and threads configured.

HAL_CPU_THREADS (a whole number) and HAL_CPU_AFFINITY (``0-3,6``) are read when the device is created; empty means
unset. Both are properties of the process, so the last device configured decides for all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hal.device import (
    ALIGNMENT,
    COLLECTIVE_TIMEOUT_S,
    Ceilings,
    DeviceFacts,
    Event,
    Graph,
    Stream,
    Timer,
    TorchCollective,
    format_bytes,
)
from hal.errors import ContractError, MemoryLimitError, UsageError
from hal_cpu import ceilings, features


class CpuEvent:
    """A point in time: on the CPU the work before it is done when it is recorded."""

    def __init__(self, timing: bool) -> None:
        self._timing = timing
        self._at_ns: int | None = None

    def record(self, stream: Stream | None = None) -> None:  # noqa: ARG002
        """Take the time; every stream is in order and synchronous, so none needs asking."""
        self._at_ns = time.perf_counter_ns()

    def wait(self) -> None:
        """Return at once: recorded work is done."""

    def query(self) -> bool:
        """Always true."""
        return True

    def elapsed_ms(self, end: Event) -> float:
        """See :class:`hal.device.Event`."""
        if not isinstance(end, CpuEvent):
            raise ContractError(f"event: elapsed_ms to a {type(end).__name__}, right is an event of the same device")
        return (end._time_ns() - self._time_ns()) / 1e6

    def _time_ns(self) -> int:
        if not self._timing:
            raise ContractError("event: elapsed_ms of an event made without timing; right is event(timing=True)")
        if self._at_ns is None:
            raise ContractError("event: elapsed_ms of an event that was never recorded")
        return self._at_ns


class CpuStream:
    """An in-order queue that is always empty: work is done when its call returns."""

    def __init__(self) -> None:
        self._tokens: list[Token[CpuStream | None]] = []

    def wait(self, event: Event) -> None:
        """Block until ``event`` is done, which keeps the order that the contract promises."""
        event.wait()

    def synchronize(self) -> None:
        """Return at once."""

    def __enter__(self) -> CpuStream:
        self._tokens.append(_CURRENT.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        _CURRENT.reset(self._tokens.pop())


_CURRENT: ContextVar[CpuStream | None] = ContextVar("hal_cpu_stream", default=None)


def _pin(cpus: frozenset[int]) -> None:
    """Bind every thread of this process: a worker that PyTorch started earlier does not follow the main thread."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread ended since it was listed
            os.sched_setaffinity(int(task.name), cpus)


class CpuDevice:
    """:class:`hal.device.DeviceServices` of the CPU.

    Raises:
        UsageError: HAL_CPU_THREADS or HAL_CPU_AFFINITY is wrong; the message says what would be right.
    """

    device = torch.device("cpu")
    supports_graphs = False

    def __init__(self) -> None:
        self._allowed = features.allowed_cpus()
        self._cpus = self._allowed
        self._default = CpuStream()
        self._ceilings: Ceilings | None = None
        threads = os.environ.get("HAL_CPU_THREADS") or None
        affinity = os.environ.get("HAL_CPU_AFFINITY") or None
        self.configure(features.parse_threads(threads) if threads else None, affinity)

    def configure(self, threads: int | None = None, affinity: str | None = None) -> None:
        """Set the number of threads of one operator and the CPUs they may run on, for the whole process.

        ``affinity`` selects among the CPUs allowed when this device was created; ``None`` keeps the present choice.
        Without ``threads`` PyTorch's number stays, lowered to what is usable. Nothing changes when an error is raised.

        Raises:
            UsageError: bad syntax, a CPU that is not allowed, or more threads than CPUs or the control group's quota.
        """
        cpus = self._cpus if affinity is None else features.choose_cpus(affinity, self._allowed)
        quota = features.cpu_quota()
        usable = features.usable_cpus(cpus, quota)
        wanted = min(torch.get_num_threads(), usable)
        count = wanted if threads is None else features.check_threads(threads, cpus, quota)
        if affinity is not None:
            if not hasattr(os, "sched_setaffinity"):
                raise UsageError(
                    f"HAL_CPU_AFFINITY={affinity!r}: this system cannot bind threads; right is to unset it"
                )
            _pin(cpus)
        torch.set_num_threads(count)
        self._cpus, self._ceilings = cpus, None

    def facts(self) -> DeviceFacts:
        """See :class:`hal.device.DeviceServices`; ``compute_units`` is the number of threads of one operator."""
        cpu = features.cpu_features()
        details = {
            "threads": str(torch.get_num_threads()),
            "cpus": features.format_cpus(self._cpus),
            "last_level_cache_bytes": str(features.last_level_cache(self._cpus)),
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "flags": " ".join(sorted(cpu.flags)),
        }
        return DeviceFacts(cpu.name, cpu.arch, features.total_memory(), torch.get_num_threads(), details)

    def free_bytes(self) -> int:
        """The least of the system's available memory and what every control group leaves this process."""
        return features.free_memory()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See :class:`hal.device.DeviceServices`. The system overcommits, so the request is checked before it."""
        if nbytes < 0:
            raise ContractError(f"allocate: {nbytes} bytes, right is 0 or more")
        free = self.free_bytes()
        if nbytes + ALIGNMENT > free:
            raise MemoryLimitError(f"cpu: {format_bytes(nbytes)} needed, {format_bytes(free)} free")
        try:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as e:  # the address space has its own limit (ulimit -v)
            cause = str(e).splitlines()[0]
            message = f"cpu: {format_bytes(nbytes)} needed, {format_bytes(free)} free, the system refused: {cause}"
            raise MemoryLimitError(message) from e
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + nbytes]

    def synchronize(self) -> None:
        """Return at once: work is done when its call returns."""

    def stream(self) -> CpuStream:
        """A new stream, which runs in step with every other."""
        return CpuStream()

    def current_stream(self) -> CpuStream:
        """The stream entered last in this context, or the device's default one."""
        return _CURRENT.get() or self._default

    def event(self, timing: bool = False) -> CpuEvent:
        """A new event."""
        return CpuEvent(timing)

    def timer(self) -> Timer:
        """See :class:`hal.device.DeviceServices`."""
        return Timer(self)

    def graph(self, fn: Callable[[], Any]) -> Graph:  # noqa: ARG002
        """Raise ContractError: the CPU has no graphs."""
        raise ContractError("cpu: graph() was called, but the CPU has no device graphs (supports_graphs is False)")

    def random_state(self) -> torch.Tensor:
        """See :class:`hal.device.DeviceServices`."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """See :class:`hal.device.DeviceServices`."""
        torch.set_rng_state(state)

    def ceilings(self) -> Ceilings:
        """Measure once per configuration, in less than three seconds on an idle machine."""
        if self._ceilings is None:
            self._ceilings = ceilings.measure(features.last_level_cache(self._cpus), self.free_bytes())
        return self._ceilings

    def collective(
        self, world_size: int, rank: int, init_method: str, timeout_s: float = COLLECTIVE_TIMEOUT_S
    ) -> TorchCollective:
        """See :class:`hal.device.DeviceServices`; the library is Gloo."""
        return TorchCollective("gloo", world_size, rank, init_method, timeout_s)
