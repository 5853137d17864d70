"""The doors through which other packages enter: entry-point groups, or a variable that lists modules instead."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from importlib import metadata

from hal.errors import UsageError

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*)(?::([A-Za-z_][\w.]*))?")


@dataclass(frozen=True)
class Entry:
    """One object to load: ``value`` is ``module`` or ``module:attribute``; ``origin`` says who asked for it."""

    name: str
    value: str
    origin: str

    def load(self) -> object:
        """Import the module and return it, or its attribute.

        Raises:
            UsageError: ``value`` is no reference; the message names origin and what is right.
            AttributeError: the module lacks the attribute.
            Exception: whatever the module raises when imported.
        """
        found = _REFERENCE.fullmatch(self.value)
        if found is None:
            raise UsageError(f"{self.origin}: {self.value!r}; right is module or module:attribute")
        loaded: object = importlib.import_module(found[1])
        for part in (found[2] or "").split("."):
            loaded = getattr(loaded, part) if part else loaded
        return loaded


def entries(group: str, variable: str) -> tuple[Entry, ...]:
    """The entries of ``group``, sorted by name; ``variable``, if set, lists exactly those to use (empty: none).

    The variable reads ``module,…`` or ``name=module:attribute,…``; without a name, ``Entry.name`` is empty.
    """
    text = os.environ.get(variable)
    if text is not None:
        parts = dict.fromkeys(p.strip() for p in text.split(","))
        return tuple(_listed(variable, p) for p in parts if p)
    found = (Entry(e.name, e.value, _origin(e)) for e in metadata.entry_points(group=group))
    return tuple(sorted(found, key=lambda e: (e.name, e.value, e.origin)))


def _listed(variable: str, text: str) -> Entry:
    name, named, value = text.partition("=")
    return Entry(name.strip() if named else "", value.strip() if named else text, f"{variable}={text}")


def _origin(e: metadata.EntryPoint) -> str:
    owner = f" of {e.dist.name} {e.dist.version}" if e.dist else ""
    return f"entry point {e.name} = {e.value}{owner}"
