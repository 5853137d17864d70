"""The CPU backend's plugin: it is on every machine, serves what PyTorch's CPU library does well, and stands last in line.

Importing this module imports no torch; the kernels are imported when they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hal.errors import BackendError
from hal.plugin import DeviceInfo, Info, Probe, hookimpl
from hal_cpu import features

if TYPE_CHECKING:
    from hal.device import DeviceServices
    from hal.kernel import Kernel


@hookimpl
def hal_info() -> Info:
    """See :func:`hal.hookspecs.hal_info`; the rank is below every chip's, so ``auto`` takes the CPU last."""
    return Info(
        name="cpu",
        vendor="any",
        description="the host's processor through PyTorch's CPU library",
        api=("1.0", "1.0"),
        stands_on=("torch>=2.11",),
        rank=-1,
        maturity="supported",
    )


@hookimpl
def hal_probe() -> Probe:
    """One device: the processors and the memory that this process may use, from /proc and the control groups."""
    cpu = features.cpu_features()
    try:
        memory = features.total_memory()
    except BackendError as e:
        return Probe(reasons=(str(e),))
    return Probe((DeviceInfo(0, cpu.name, cpu.arch, memory, {"cpus": str(len(features.allowed_cpus()))}),))


@hookimpl
def hal_register(register: Callable[[Kernel], None]) -> None:
    """Register every kernel; which architecture one needs is in its claim."""
    from hal_cpu.kernels import KERNELS
    from hal_cpu.kernels.native import NATIVE

    for kernel in (*KERNELS, *NATIVE):
        register(kernel)


@hookimpl
def hal_device(index: int) -> DeviceServices:  # noqa: ARG001  (the host asks for probed indices only: it is 0)
    """The services of the CPU."""
    from hal_cpu.device import CpuDevice

    return CpuDevice()


@hookimpl
def hal_weight_formats(arch: str) -> Mapping[str, tuple[str, ...]]:  # noqa: ARG001  (the same on every one)
    """Decoded weights first, since no CPU multiplies FP8 or FP4; as stored where they would not fit.

    ``wide`` is the dtype of operands of float32 products. ``dense_dtype`` is that of decoded weights: bfloat16 holds FP8 and
    FP4 values times their scales exactly, and the kernels widen it in the cache as fast as float32 is read from memory,
    whether or not the CPU multiplies bfloat16 natively.
    """
    return {
        "fp8": ("dense", "fp8"),
        "fp4": ("dense", "fp4"),
        "wide": ("float32",),
        "dense_dtype": ("bfloat16", "float32"),
    }
