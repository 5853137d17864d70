"""The AMD ROCm backend's plugin, designed for gfx942 and gfx950: finds devices; kernels and device services come later."""

from __future__ import annotations

from typing import NoReturn

from hal.errors import BackendError
from hal.machine import amd
from hal.plugin import Info, Probe, hookimpl

MISSING = "no kernels and no device services yet; use --backend cpu"


@hookimpl
def hal_info() -> Info:
    """See :func:`hal.hookspecs.hal_info`."""
    return Info(
        name="rocm",
        vendor="AMD",
        api=("1.0", "1.0"),
        stands_on=("triton>=3.6",),
        description="AMD Instinct through Triton",
        maturity="designed-for",
    )


@hookimpl
def hal_probe() -> Probe:
    """Report devices from /dev/kfd and the topology under /sys/class/kfd."""
    return amd().probe(f"backend rocm: {MISSING}")


@hookimpl
def hal_register() -> None:
    """Register nothing: there is no kernel yet."""


@hookimpl
def hal_device(index: int) -> NoReturn:
    """Raise BackendError: device services are still to be written."""
    raise BackendError(f"backend rocm: device {index} cannot be used: {MISSING}")
