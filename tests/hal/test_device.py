"""Device services: protocols, value types, the timer, and arguments of the collective."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from hal.device import (
    Ceilings,
    DeviceFacts,
    DeviceServices,
    Event,
    Stream,
    Timer,
    TorchCollective,
    format_bytes,
)
from hal.errors import BackendError, ContractError, UsageError
from hal_cpu.device import CpuDevice


def test_the_cpu_device_satisfies_every_protocol_and_another_object_does_not() -> None:
    services: DeviceServices = CpuDevice()
    assert isinstance(services, DeviceServices)
    assert isinstance(services.stream(), Stream)
    assert isinstance(services.event(), Event)
    assert not isinstance(object(), DeviceServices)
    assert not isinstance(services.event(), Stream)


@pytest.mark.parametrize(
    "value",
    [DeviceFacts("chip", "arch", 1, 1, {}), Ceilings(1.0, 1.0, {}, "2026-01-01", 1.0)],
    ids=["facts", "ceilings"],
)
def test_facts_and_ceilings_are_frozen(value: object) -> None:
    first = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first, "other")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (5 << 40, "5.00 TiB")],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_timer_measures_the_block_in_milliseconds() -> None:
    with CpuDevice().timer() as timer:
        start = time.perf_counter()
        time.sleep(0.02)
        slept_ms = (time.perf_counter() - start) * 1e3
    assert slept_ms <= timer.ms < slept_ms + 1000


def test_a_timer_cannot_be_read_before_its_block_ends() -> None:
    timer = CpuDevice().timer()
    with pytest.raises(ContractError, match="before"):
        _ = timer.ms
    with timer, pytest.raises(ContractError, match="before"):
        _ = timer.ms
    assert timer.ms >= 0


def test_a_timer_waits_for_the_end_of_the_work_that_it_times() -> None:
    calls: list[str] = []

    class Late(CpuDevice):
        """An event here is done only once it was waited for."""

        def event(self, timing: bool = False) -> Event:  # type: ignore[override]
            inner = super().event(timing)

            class LateEvent:
                done = False

                def record(self, stream: Stream | None = None) -> None:
                    inner.record(stream)

                def wait(self) -> None:
                    calls.append("wait")
                    self.done = True

                def query(self) -> bool:
                    return self.done

                def elapsed_ms(self, end: Event) -> float:
                    assert end.query(), "the end was not waited for"
                    return 1.5

            return LateEvent()

    with Timer(Late()) as timer:
        assert calls == []
    assert timer.ms == 1.5


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_its_world_is_a_usage_error(world_size: int, rank: int) -> None:
    with pytest.raises(UsageError, match=rf"rank {rank} of world size {world_size}"):
        TorchCollective("gloo", world_size, rank, "file:///nowhere", 1.0)


def test_a_meeting_point_of_unknown_kind_names_rank_and_address() -> None:
    with pytest.raises(BackendError, match=r"collective join: rank 0 of 2 \(gloo, ftp://nowhere"):
        TorchCollective("gloo", 2, 0, "ftp://nowhere", 1.0)
    assert not torch.distributed.is_initialized()
