"""Find the backends, load each on its own, and choose one. Light: torch is imported only when kernels register.

A plugin that cannot be used is never skipped in silence: it becomes a :class:`Backend` whose state is ``broken`` and
whose errors say why. Discovery order decides nothing.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from hal import hookspecs
from hal.entries import Entry, entries
from hal.errors import BackendError, ContractError, HalError
from hal.hookspecs import API_VERSION, REQUIRED
from hal.plugin import PROJECT, Info, Probe
from hal.quiet import captured

if TYPE_CHECKING:
    from hal.device import DeviceServices
    from hal.kernel import Kernel

State = Literal["ready", "absent", "broken"]
Kernels = Mapping[str, "tuple[Kernel, ...]"]

#: Modules of the framework that declare operators, by name: they enter through the same door as any other package's.
BARE_OPERATORS = ("hal_ops", "hal_model.layers")


def load_operators() -> None:
    """Import every module that declares operators: group ``hal.operators``, or those of ``HAL_OPERATORS``.

    On a machine without installed metadata those of :data:`BARE_OPERATORS` are taken that can be found.

    Raises:
        ContractError: a module cannot be imported; the message names it and the cause.
    """
    found = entries("hal.operators", "HAL_OPERATORS")
    if not found and "HAL_OPERATORS" not in os.environ:
        found = tuple(Entry(m, m, f"the default {m}") for m in BARE_OPERATORS if find_spec(m.partition(".")[0]))
    for entry in found:
        try:
            entry.load()
        except (ImportError, AttributeError) as e:
            raise ContractError(f"operators of {entry.origin}: {describe(e)}; install it anew or remove it") from e


def describe(e: BaseException) -> str:
    """An exception on one line; errors of ours carry their whole meaning in the text."""
    text = " ".join(str(e).split())
    if isinstance(e, HalError | pluggy.PluginValidationError):
        return text
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


@dataclass(frozen=True)
class _Registered:
    kernels: Kernels
    errors: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Backend:
    """One plugin as found: who it is, what its probe saw, and everything that is wrong with it.

    ``origin`` is the entry point or variable that named it; ``load_errors`` and ``load_notes`` (captured output,
    tracebacks) stem from loading, :attr:`errors` and :attr:`notes` include those of registration.
    """

    name: str
    origin: str
    plugin: object | None = None
    info: Info | None = None
    probe: Probe | None = None
    load_errors: tuple[str, ...] = ()
    load_notes: tuple[str, ...] = ()
    hooks: pluggy.PluginManager | None = field(default=None, repr=False, compare=False)
    _registered: list[_Registered] = field(default_factory=list, repr=False, compare=False)

    @property
    def errors(self) -> tuple[str, ...]:
        """Everything that makes the backend broken."""
        return self.load_errors + tuple(e for r in self._registered for e in r.errors)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plugin printed, and tracebacks of what it raised."""
        return self.load_notes + tuple(n for r in self._registered for n in r.notes)

    @property
    def state(self) -> State:
        """``broken`` with any error, else ``ready`` with a device, else ``absent``."""
        if self.errors or self.probe is None:
            return "broken"
        return "ready" if self.probe.devices else "absent"

    @property
    def designed_for(self) -> bool:
        """Whether the backend is only designed for its chip, so that ``auto`` passes it over."""
        return self.info is not None and self.info.maturity == "designed-for"

    def why(self) -> str:
        """One line: the errors, or the probe's reasons; empty for a backend that nothing speaks against."""
        if self.state == "broken":
            return "; ".join(self.errors)
        return "; ".join(self.probe.reasons if self.probe else ())

    def kernels(self, force: bool = False) -> Kernels:
        """Operator name -> kernels; the first call runs ``hal_register``, on a device or with ``force`` only.

        Raises:
            BackendError: the backend is broken (registration may show it), or absent and not forced.
            ContractError: the operators cannot be imported.
        """
        if self.state == "absent" and not force:
            raise BackendError(f"backend {self.name} is absent: {self.why()}")
        if self.state != "broken" and not self._registered:
            self._registered.append(_register(self))
        if self.state == "broken":
            raise BackendError(f"backend {self.name} is broken: {self.why()}")
        return self._registered[0].kernels

    def device(self, index: int) -> DeviceServices:
        """The services of the probed device ``index``.

        Raises:
            BackendError: no such device, or the backend cannot open it.
            ContractError: the hook returned nothing.
        """
        known = [d.index for d in self.probe.devices] if self.probe else []
        if index not in known:
            seen = ", ".join(map(str, known)) or "none"
            raise BackendError(f"backend {self.name}: device {index} is not among those probed: {seen}")
        services: DeviceServices | None = self._hook("hal_device", index=index)
        if services is None:
            raise ContractError(f"plugin {self.name}: hal_device({index}) returned None, right is DeviceServices")
        return services

    def weight_formats(self, arch: str) -> Mapping[str, tuple[str, ...]]:
        """Stored format -> formats wanted on ``arch``, best first; empty if the plugin does not say."""
        return self._hook("hal_weight_formats", arch=arch) or {}

    def tuning_space(self, operator: str) -> Mapping[str, tuple[object, ...]]:
        """Parameter -> values worth trying for the backend's kernels of ``operator``; empty: nothing to tune."""
        return self._hook("hal_tuning_space", operator=operator) or {}

    def _hook(self, hook: str, **arguments: Any) -> Any:
        if self.hooks is None:
            raise BackendError(f"backend {self.name} is broken: {self.why()}")
        return getattr(self.hooks.hook, hook)(**arguments)


@dataclass(frozen=True)
class Choice:
    """The backend chosen, its device, why, and one line for each backend that ``auto`` had to skip."""

    backend: Backend
    device: int
    skipped: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Backends:
    """All backends found, sorted by name (a name that two plugins claim appears twice, both broken)."""

    found: tuple[Backend, ...]

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.found)

    def named(self, name: str, source: str) -> Backend:
        """The backend called ``name``; ``source`` (a flag or variable with its value) begins the error.

        Raises:
            BackendError: no such backend; lists those known.
        """
        for backend in self.found:
            if backend.name == name:
                return backend
        from hal.register import suggestion

        known = [b.name for b in self.found]
        limit = f" (HAL_PLUGINS={os.environ['HAL_PLUGINS']} limits them)" if "HAL_PLUGINS" in os.environ else ""
        listed = ", ".join(f"{b.name} ({b.state})" for b in self.found) or "none"
        raise BackendError(f"{source}: no backend {name!r}{suggestion(name, known)}; known are {listed}{limit}")

    def choose(self, name: str | None = None) -> Choice:
        """Choose by ``name`` (the value of ``--backend``), else by ``HAL_BACKEND``, else automatically.

        The kernels of what is chosen have registered without an error.

        Raises:
            BackendError: unknown, broken or absent by name; no backend, or several equally good ones, automatically.
        """
        variable = os.environ.get("HAL_BACKEND", "")
        wanted, source = (name, "--backend") if name else (variable, "HAL_BACKEND")
        if wanted in ("", "auto"):
            return self._auto()
        return self._by_name(wanted, f"{source} {wanted}" if name else f"{source}={wanted}")

    def _by_name(self, name: str, source: str) -> Choice:
        backend = self.named(name, source)
        try:
            backend.kernels()
        except BackendError as e:
            raise BackendError(f"{source}: {e}") from e
        return Choice(backend, _first_device(backend), (), source)

    def _auto(self) -> Choice:
        able = [b for b in self.found if b.state == "ready" and not b.designed_for]
        for rank in sorted({_rank(b) for b in able}, reverse=True):
            best = [b for b in able if _rank(b) == rank and _registers(b)]
            if len(best) > 1:
                devices = ", ".join(f"{b.name} ({b.probe.devices[0].name})" for b in best if b.probe)
                raise BackendError(f"--backend auto: several backends have a device: {devices}; choose with --backend")
            if best:
                why = f"auto: {best[0].name} has the highest rank, {rank}, among the backends with a device"
                return Choice(best[0], _first_device(best[0]), self._skipped(), why)
        lines = "; ".join(self._skipped()) or "no plugin is installed"
        raise BackendError(f"--backend auto: no backend can be used: {lines}")

    def _skipped(self) -> tuple[str, ...]:
        return tuple(_skip_line(b) for b in self.found if b.state != "ready" or b.designed_for)


def _rank(backend: Backend) -> int:
    return backend.info.rank if backend.info else 0


def _first_device(backend: Backend) -> int:
    return backend.probe.devices[0].index if backend.probe else 0


def _registers(backend: Backend) -> bool:
    """Whether the kernels register; if not, the backend is broken by now and is listed as skipped."""
    try:
        backend.kernels()
    except BackendError:
        return False
    return True


def _skip_line(backend: Backend) -> str:
    if backend.state == "ready":
        return f"{backend.name} skipped: designed for its chip, not chosen automatically: {backend.why()}"
    return f"{backend.name} skipped, {backend.state}: {backend.why()}"


def load(group: str = "hal.backends") -> Backends:
    """Load every plugin of ``group``, or exactly the modules that ``HAL_PLUGINS`` lists (set to nothing: none).

    Never raises for a plugin's sake and prints nothing; output of plugins is kept in their notes.
    """
    found = sorted((_load_one(e) for e in entries(group, "HAL_PLUGINS")), key=lambda b: (b.name, b.origin))
    return Backends(tuple(_refuse_twins(b, found) for b in found))


def _refuse_twins(backend: Backend, found: Sequence[Backend]) -> Backend:
    origins = [b.origin for b in found if b.name == backend.name]
    if len(origins) == 1:
        return backend
    error = f"{len(origins)} plugins are called {backend.name}: {'; '.join(origins)}; uninstall or rename all but one"
    return replace(backend, load_errors=(*backend.load_errors, error))


@dataclass
class _Loading:
    """One plugin on its way in; ``stage`` is what an exception is blamed on."""

    entry: Entry
    stage: str = ""
    backend: Backend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = Backend(self.entry.name or self.entry.value, self.entry.origin)

    def run(self) -> None:
        self.stage = f"import of {self.entry.value}"
        plugin = self.entry.load()
        self.backend = replace(self.backend, plugin=plugin)
        self.stage = "hal_info"
        self._identify(plugin)
        self.stage = "hooks"
        hooks = _hooks(plugin, hookspecs)
        hooks.check_pending()
        for hook in REQUIRED:
            _require(hooks, plugin, hook)
        self.stage = "hal_probe"
        probe = _typed(hooks.hook.hal_probe(), Probe, "hal_probe")
        self.backend = replace(self.backend, hooks=hooks, probe=probe)

    def _identify(self, plugin: object) -> None:
        """Ask who it is before anything else is judged: hooks of another API version may well look wrong."""
        hooks = _hooks(plugin, SimpleNamespace(hal_info=hookspecs.hal_info))
        _require(hooks, plugin, "hal_info")
        info = _typed(hooks.hook.hal_info(), Info, "hal_info")
        self.backend = replace(self.backend, info=info, name=self.entry.name or info.name)
        if info.name != self.backend.name:
            raise ContractError(f"Info.name is {info.name!r}, right is the entry point's name {self.backend.name!r}")
        _check_window(info)


def _load_one(entry: Entry) -> Backend:
    loading, trace = _Loading(entry), ""
    errors: tuple[str, ...] = ()
    with captured() as printed:
        try:
            loading.run()
        # A plugin is foreign code: whatever it raises, sys.exit included, is its own fault and must not stop the rest.
        except (Exception, SystemExit) as e:  # noqa: BLE001
            errors, trace = (f"{loading.stage}: {describe(e)}",), traceback.format_exc()
    notes = tuple(f"printed while loading: {text}" for text in printed) + ((trace,) if trace else ())
    return replace(loading.backend, load_errors=errors, load_notes=notes)


def _hooks(plugin: object, specs: Any) -> pluggy.PluginManager:
    """A manager for this plugin alone: what pluggy refuses then concerns no other plugin."""
    hooks = pluggy.PluginManager(PROJECT)
    hooks.add_hookspecs(specs)
    hooks.register(plugin)
    return hooks


def _require(hooks: pluggy.PluginManager, plugin: object, hook: str) -> None:
    if getattr(hooks.hook, hook).get_hookimpls():
        return
    cause = f"{hook} lacks the marker @hal.plugin.hookimpl" if hasattr(plugin, hook) else f"{hook} is missing"
    raise ContractError(f"{cause}; required hooks are {', '.join(REQUIRED)}")


def _typed(value: object, kind: type[Any], hook: str) -> Any:
    if not isinstance(value, kind):
        raise ContractError(f"{hook} returned {value!r}, right is hal.plugin.{kind.__name__}")
    return value


def _check_window(info: Info) -> None:
    low, high = info.window
    if low <= API_VERSION <= high:
        return
    remedy = "upgrade the plugin" if high < API_VERSION else "upgrade hal-v4, or install an older plugin"
    spoken = f"{_dotted(low)} to {_dotted(high)}"
    raise ContractError(f"speaks plugin API {spoken}, this host speaks {_dotted(API_VERSION)}; {remedy}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _register(backend: Backend) -> _Registered:
    """Run ``hal_register`` with a checking callback; what goes wrong is kept, not raised."""
    load_operators()
    from hal.register import Registrar

    registrar, trace = Registrar(backend.name), ""
    with captured() as printed:
        try:
            backend._hook("hal_register", register=registrar.add)
        # Foreign code again, see _load_one.
        except (Exception, SystemExit) as e:  # noqa: BLE001
            registrar.errors.append(f"plugin {backend.name}: hal_register: {describe(e)}")
            trace = traceback.format_exc()
    notes = tuple(f"printed while registering: {text}" for text in printed) + ((trace,) if trace else ())
    return _Registered(registrar.frozen(), tuple(registrar.errors), notes)
