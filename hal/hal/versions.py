"""Versions of installed distributions, read from their metadata without importing them."""

from __future__ import annotations

import re
from importlib import metadata

_CLAUSE = re.compile(r"\s*(>=|<=|==|<|>)\s*([\d.]+)\s*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(.*)")


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, local label included (``2.13.0+cpu``); ``None`` if not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` -> ``(2, 13)``: the numbers in front, without zeros at the end."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(n) for n in numbers[0].split(".")] if numbers else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def within(version: str, window: str) -> bool:
    """Whether ``version`` satisfies ``window``, such as ``">=2.11,<2.14"``; the empty window admits everything.

    Raises:
        ValueError: a clause that is not a comparison with numbers.
    """
    return all(_holds(release(version), clause) for clause in window.split(",") if clause.strip())


def _holds(seen: tuple[int, ...], clause: str) -> bool:
    found = _CLAUSE.fullmatch(clause)
    if found is None:
        raise ValueError(f"version clause {clause!r}; right is >=, <=, ==, < or > and numbers")
    limit = release(found[2])
    return {
        ">=": seen >= limit,
        "<=": seen <= limit,
        "==": seen == limit,
        "<": seen < limit,
        ">": seen > limit,
    }[found[1]]


def unmet(requirement: str) -> str | None:
    """Why the installed distributions do not meet ``"triton>=3.6"``, or ``None``."""
    found = _REQUIREMENT.fullmatch(requirement)
    if found is None:
        return f"requirement {requirement!r} cannot be read; right is NAME>=VERSION"
    name, window = found.groups()
    version = installed(name)
    if version is None:
        return f"{name} is not installed, needed is {requirement}"
    try:
        return None if within(version, window) else f"{name} is {version}, needed is {requirement}"
    except ValueError as e:
        return f"requirement {requirement!r}: {e}"
