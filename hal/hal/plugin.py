"""What a plugin tells the host: who it is, what it found, and the marker of its hooks. Light: imports no torch.

A plugin is a module (or an object) whose functions carry :data:`hookimpl`; :mod:`hal.hookspecs` is their contract.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import pluggy

from hal.errors import ContractError

PROJECT = "hal"
hookimpl = pluggy.HookimplMarker(PROJECT)

Maturity = Literal["supported", "designed-for"]
Version = tuple[int, int]

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_VERSION = re.compile(r"(\d+)\.(\d+)")


def parse_version(value: str | Version) -> Version:
    """``"1.0"`` or ``(1, 0)`` -> ``(1, 0)``.

    Raises:
        ContractError: anything else.
    """
    if isinstance(value, str):
        found = _VERSION.fullmatch(value)
        if found:
            return int(found[1]), int(found[2])
    elif isinstance(value, tuple) and len(value) == 2 and all(type(v) is int for v in value):
        return value
    raise ContractError(f'API version {value!r}; right is "MAJOR.MINOR" or (MAJOR, MINOR)')


@dataclass(frozen=True)
class Info:
    """Who a backend is.

    ``name``: what ``--backend`` takes, equal to the entry point's name; ``api``: lowest and highest plugin-API version
    spoken; ``stands_on``: distributions needed to run, as requirements (``"triton>=3.6"``); ``maturity``: a
    ``designed-for`` backend is never chosen by ``auto``; ``rank``: ``auto`` prefers the highest among backends with a
    device (the embedded CPU backend has -1).

    Raises:
        ContractError: a field is malformed; the message names it, the value and what is right.
    """

    name: str
    vendor: str
    api: tuple[str | Version, str | Version]
    stands_on: tuple[str, ...] = ()
    description: str = ""
    maturity: Maturity = "supported"
    rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == "auto":
            raise ContractError(f"Info.name is {self.name!r}; right is {_NAME.pattern}, and not 'auto'")
        if not isinstance(self.api, tuple) or len(self.api) != 2:
            raise ContractError(f'Info.api is {self.api!r}; right is two versions (lowest, highest): ("1.0", "1.0")')
        low, high = self.window
        if low > high:
            raise ContractError(f"Info.api is {self.api!r}; right is the lowest version first")
        if not isinstance(self.stands_on, tuple):
            raise ContractError(f'Info.stands_on is {self.stands_on!r}; right is a tuple: ("triton>=3.6",)')
        if self.maturity not in get_args(Maturity):
            raise ContractError(f"Info.maturity is {self.maturity!r}; right is one of {', '.join(get_args(Maturity))}")

    @property
    def window(self) -> tuple[Version, Version]:
        """Lowest and highest API version, parsed."""
        return parse_version(self.api[0]), parse_version(self.api[1])


@dataclass(frozen=True)
class DeviceInfo:
    """One device as metadata shows it; ``memory_bytes`` 0 and ``arch`` ``"unknown"`` where metadata does not tell."""

    index: int
    name: str
    arch: str
    memory_bytes: int
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """What a probe found: devices, and the reasons why there are none (or why those found are of limited use).

    Raises:
        ContractError: no device and no reason, or two devices with one index.
    """

    devices: tuple[DeviceInfo, ...] = ()
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.devices, tuple) or not isinstance(self.reasons, tuple):
            raise ContractError("Probe.devices and Probe.reasons must be tuples")
        if not self.devices and not self.reasons:
            raise ContractError("Probe has no device and no reason; right is one reason at least, with the remedy")
        indices = [d.index for d in self.devices]
        if len(set(indices)) < len(indices):
            raise ContractError(f"Probe.devices have indices {indices}; right is each index once")
