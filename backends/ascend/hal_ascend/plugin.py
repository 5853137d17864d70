"""The Huawei Ascend backend's plugin, designed for 910B and 910C: finds devices; kernels and device services come later."""

from __future__ import annotations

from typing import NoReturn

from hal.errors import BackendError
from hal.machine import ascend
from hal.plugin import Info, Probe, hookimpl

MISSING = "no kernels and no device services yet; use --backend cpu"


@hookimpl
def hal_info() -> Info:
    """See :func:`hal.hookspecs.hal_info`."""
    return Info(
        name="ascend",
        vendor="Huawei",
        api=("1.0", "1.0"),
        stands_on=("torch-npu>=2.11",),
        description="Huawei Ascend through torch_npu",
        maturity="designed-for",
    )


@hookimpl
def hal_probe() -> Probe:
    """Report devices from /dev/davinci0, …, /dev/davinci_manager and the installed driver or npu-smi."""
    return ascend().probe(f"backend ascend: {MISSING}")


@hookimpl
def hal_register() -> None:
    """Register nothing: there is no kernel yet."""


@hookimpl
def hal_device(index: int) -> NoReturn:
    """Raise BackendError: device services are still to be written."""
    raise BackendError(f"backend ascend: device {index} cannot be used: {MISSING}")
