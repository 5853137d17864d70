"""The plugin API: each hook's docstring is its contract, its body is empty.

A hook may leave out parameters that it does not need. The API's version rises in its second number when a hook or an
optional field is added, in its first when an existing plugin would break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pluggy

from hal.plugin import PROJECT, Info, Probe

if TYPE_CHECKING:
    from hal.device import DeviceServices
    from hal.kernel import Kernel

API_VERSION = (1, 0)
REQUIRED = ("hal_info", "hal_probe", "hal_register", "hal_device")

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec(firstresult=True)
def hal_info() -> Info:  # type: ignore[empty-body]
    """Say who the backend is. Called at every start, before any other hook; must not import a chip library.

    Required. An API window that excludes the host's version makes the backend *broken*; nothing else is called then.
    """


@hookspec(firstresult=True)
def hal_probe() -> Probe:  # type: ignore[empty-body]
    """Find the devices, or say why there are none: what is missing and the remedy, one reason each.

    Required. Called at every start on every machine. It reads metadata (/proc, /dev, /sys, installed versions), has no
    side effects (no context on a device, no file, no variable), never imports the library of an absent chip, never
    confuses another vendor's devices with its own, and returns within a second. Raising makes the backend *broken*.
    """


@hookspec
def hal_register(register: Callable[[Kernel], None]) -> None:
    """Call ``register(kernel)`` for every kernel, made with :func:`hal.kernel.kernel`.

    Required. Called at most once, when the backend is chosen, its probe found a device, or on demand (``--check``,
    conformance); operators are declared by then. This is the place to import the chip's libraries. Every kernel is
    checked (operator, version, signature, claim, evidence, unique name); one bad kernel makes the backend *broken*.
    """


@hookspec(firstresult=True)
def hal_device(index: int) -> DeviceServices:  # type: ignore[empty-body]
    """Return the services of the device with that index among the probed ones.

    Required. Raise :class:`hal.errors.BackendError` if it cannot be opened: what failed and the remedy.
    """


@hookspec(firstresult=True)
def hal_weight_formats(arch: str) -> Mapping[str, tuple[str, ...]]:  # type: ignore[empty-body]
    """For each format that a checkpoint stores, the formats that kernels on ``arch`` want, best first.

    Optional; a stored format not named is wanted as it is.
    """


@hookspec(firstresult=True)
def hal_tuning_space(operator: str) -> Mapping[str, tuple[object, ...]]:  # type: ignore[empty-body]
    """For each tunable parameter of the backend's kernels of ``operator``, the values worth trying, default first.

    Optional; empty means nothing to tune.
    """
