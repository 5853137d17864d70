"""Kernels of the CPU: each beats the reference where it is registered (see ``benchmarks/cpu_kernels.py``)."""

from __future__ import annotations

from hal.kernel import Kernel
from hal_cpu.kernels import attention, linear, mhc, moe, quant, sampling

MODULES = (attention, linear, mhc, moe, quant, sampling)
KERNELS: tuple[Kernel, ...] = tuple(
    k for m in MODULES for k in vars(m).values() if isinstance(k, Kernel) and k.fn.__module__ == m.__name__
)
