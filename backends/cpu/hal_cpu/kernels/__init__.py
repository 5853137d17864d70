"""Kernels of the CPU: each beats the reference where it is registered (see ``benchmarks/cpu_kernels.py``)."""

from __future__ import annotations

from hal.kernel import Kernel

KERNELS: tuple[Kernel, ...] = ()
