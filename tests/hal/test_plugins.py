"""The plugin door: whatever a plugin does wrong, it alone is refused, by name and with the cause; nothing is silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hal.errors import BackendError, ContractError, UsageError
from hal.plugin import DeviceInfo, Info, Probe, parse_version
from hal.plugins import Backend, load, load_operators
from hal.quiet import captured

INFO = '@hookimpl\ndef hal_info(): return Info("{name}", "Acme", ("{low}", "{high}"), rank={rank}, maturity="{maturity}")\n'
PROBE = '@hookimpl\ndef hal_probe(): return Probe((DeviceInfo(3, "{name} chip", "a1", 1 << 30),))\n'
ABSENT = '@hookimpl\ndef hal_probe(): return Probe((), ("no Acme card in the slot; insert one",))\n'
REGISTER = "@hookimpl\ndef hal_register(register): pass\n"
DEVICE = "@hookimpl\ndef hal_device(index): return ('services', index)\n"
IN_TREE = ("ascend", "cpu", "cuda", "rocm")
HEAD = "from hal.plugin import DeviceInfo, Info, Probe, hookimpl\n"
RMS_NORM = """
from hal.kernel import Claim, Range, kernel
@kernel("rms_norm")
def fast(x, weight, eps): return x
"""


def source(
    *, drop: str = "", name: str = "acme", low: str = "1.0", high: str = "1.0", extra: str = "", **parts: Any
) -> str:
    """A plugin's text; ``drop`` leaves one hook out, a part named like its hook replaces it."""
    hooks = {"info": INFO, "probe": PROBE, "register": REGISTER, "device": DEVICE} | parts
    rank, maturity = hooks.pop("rank", 0), hooks.pop("maturity", "supported")
    hooks["info"] = hooks["info"].format(name=name, low=low, high=high, rank=rank, maturity=maturity)
    hooks["probe"] = hooks["probe"].format(name=name)
    return HEAD + "".join(text for hook, text in hooks.items() if hook != drop) + extra


def install(site: Path, text: str, name: str = "acme", module: str = "acme_plugin", value: str | None = None) -> None:
    """Write a module and the metadata of a distribution that declares it as backend ``name``."""
    (site / f"{module}.py").write_text(text)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hal.backends]\n{name} = {value or module}\n")


def python(site: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``site`` on its path and only these HAL_ variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")} | variables
    env["PYTHONPATH"] = os.pathsep.join([str(site), *sys.path])
    return subprocess.run([sys.executable, *args], env=env, cwd=site, capture_output=True, text=True, timeout=120)


def listed(site: Path, *args: str, **variables: str) -> dict[str, Any]:
    """``hal backends --json`` by name; a name listed twice keeps its last record."""
    done = python(site, "-m", "hal", "backends", "--json", *args, **variables)
    assert done.stderr == ""
    return {b["name"]: b for b in json.loads(done.stdout)["backends"]}


WRONG_DEVICE = "@hookimpl\ndef hal_device(number): pass\n"
UNMARKED = "def hal_device(index): pass\n"
BAD_ENVIRONMENTS = {
    "entry point to a missing attribute": (
        source(),
        "acme_plugin:nothing",
        "import of acme_plugin:nothing: AttributeError: module 'acme_plugin' has no attribute 'nothing'",
    ),
    "entry point to a missing module": (source(), "acme_gone", "import of acme_gone: ModuleNotFoundError"),
    "module raises ImportError": (
        "raise ImportError('libacme.so: cannot open')",
        None,
        "import of acme_plugin: ImportError: libacme.so: cannot open",
    ),
    "module exits": ("raise SystemExit(3)", None, "import of acme_plugin: SystemExit: 3"),
    "module has a syntax error": ("def (", None, "import of acme_plugin: SyntaxError"),
    "probe raises": (
        source(probe="@hookimpl\ndef hal_probe(): raise OSError('bus error on slot 2')\n"),
        None,
        "hal_probe: OSError: bus error on slot 2",
    ),
    "probe returns nothing": (
        source(probe="@hookimpl\ndef hal_probe(): return None\n"),
        None,
        "hal_probe returned None, right is hal.plugin.Probe",
    ),
    "probe gives no reason": (
        source(probe="@hookimpl\ndef hal_probe(): return Probe()\n"),
        None,
        "Probe has no device and no reason",
    ),
    "API of the past": (
        source(low="0.1", high="0.9"),
        None,
        "speaks plugin API 0.1 to 0.9, this host speaks 1.0; upgrade the plugin",
    ),
    "API of the past with hooks of the past": (
        source(low="0.1", high="0.9", device=WRONG_DEVICE),
        None,
        "speaks plugin API 0.1 to 0.9, this host speaks 1.0; upgrade the plugin",
    ),
    "API of the future": (
        source(low="2.0", high="2.1"),
        None,
        "speaks plugin API 2.0 to 2.1, this host speaks 1.0; upgrade hal-v4",
    ),
    "required hook is missing": (source(drop="probe"), None, "hal_probe is missing; required hooks are hal_info"),
    "hook without its marker": (source(device=UNMARKED), None, "hal_device lacks the marker @hal.plugin.hookimpl"),
    "hook with a wrong signature": (source(device=WRONG_DEVICE), None, "hookimpl definition: hal_device(number)"),
    "hook that does not exist": (source(extra="@hookimpl\ndef hal_prob(): pass\n"), None, "unknown hook 'hal_prob'"),
    "another name than the entry point's": (
        source(name="bcme"),
        None,
        "Info.name is 'bcme', right is the entry point's name 'acme'",
    ),
    "malformed maturity": (source(maturity="perfect"), None, "Info.maturity is 'perfect'; right is one of supported"),
}


NAMES = {case: f"acme{i}" for i, case in enumerate(BAD_ENVIRONMENTS)}


@pytest.fixture(scope="module")
def all_bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One machine with every bad plugin installed at once, each under a name of its own."""
    site = tmp_path_factory.mktemp("all_bad")
    for case, (text, value, _) in BAD_ENVIRONMENTS.items():
        name = NAMES[case]
        value = value.replace("acme", name) if value else None
        install(site, text.replace("acme", name), name=name, module=f"{name}_plugin", value=value)
    install(site, source(name="sound"), name="sound", module="sound_plugin")
    return listed(site)


@pytest.mark.parametrize("case", BAD_ENVIRONMENTS)
def test_a_bad_plugin_is_broken_with_its_cause(case: str, all_bad: dict[str, Any]) -> None:
    found = all_bad[NAMES[case]]
    assert found["state"] == "broken"
    assert BAD_ENVIRONMENTS[case][2].replace("acme", NAMES[case]) in " ".join(found["errors"])
    assert f"{NAMES[case]}_plugin 1.0" in found["origin"]


def test_bad_plugins_do_not_break_a_sound_one(all_bad: dict[str, Any]) -> None:
    assert {name for name, b in all_bad.items() if b["state"] == "broken"} == set(NAMES.values())
    assert (all_bad["sound"]["state"], all_bad["sound"]["errors"]) == ("ready", [])


def test_two_plugins_with_one_name_are_both_broken_and_the_error_names_both(tmp_path: Path) -> None:
    for module in ("one", "two"):
        install(tmp_path, source(), module=module)
    done = python(tmp_path, "-m", "hal", "backends", "--json")
    twins = [b for b in json.loads(done.stdout)["backends"] if b["name"] == "acme"]
    assert [b["state"] for b in twins] == ["broken", "broken"]
    for twin in twins:
        assert "2 plugins are called acme" in twin["errors"][0]
        assert "acme = one of one 1.0" in twin["errors"][0]
        assert "acme = two of two 1.0" in twin["errors"][0]


NOISY = """
import logging, os, subprocess, sys, warnings
print("python says hello")
print("to stderr", file=sys.stderr)
os.write(1, b"native says hello\\n")
subprocess.run(["sh", "-c", "echo child says hello"])
warnings.warn("about to break")
handler = logging.StreamHandler()
"""


def test_what_a_plugin_prints_is_kept_as_a_note_and_not_shown(tmp_path: Path) -> None:
    install(tmp_path, NOISY + source(probe=PROBE.replace("return", "print('probing'); return")))
    done = python(tmp_path, "-m", "hal", "backends")
    assert done.stderr == ""
    assert {line.split()[0] for line in done.stdout.splitlines()} <= {"NAME", "acme", *IN_TREE}
    assert "acme chip" in done.stdout
    notes = " ".join(listed(tmp_path)["acme"]["notes"])
    for text in ("python says hello", "to stderr", "native says hello", "child says", "about to break", "probing"):
        assert text in notes


def test_a_log_handler_made_while_loading_works_afterwards(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY + source())
    script = "import hal.plugins, noisy_check"
    check = "import logging, hal.plugins\nhal.plugins.load()\nimport noisy\nlogging.root.addHandler(noisy.handler)\n"
    (tmp_path / "noisy_check.py").write_text(check + "logging.warning('late news')\n")
    done = python(tmp_path, "-c", script, HAL_PLUGINS="noisy")
    assert done.stderr == "late news\n"
    assert done.stdout == ""


def test_listing_imports_no_chip_library_and_prints_only_the_table(tmp_path: Path) -> None:
    script = """
        import sys
        from hal.cli import run
        code = run(["backends"])
        heavy = {"torch", "triton", "torch_npu", "transformers"} & set(sys.modules)
        print("IMPORTED", sorted(heavy), code)
    """
    modules = ",".join(f"hal_{name}.plugin" for name in IN_TREE)
    done = python(tmp_path, "-c", textwrap.dedent(script), HAL_PLUGINS=modules)
    *rows, last = done.stdout.splitlines()
    assert last == "IMPORTED [] 0"
    assert [row.split()[0] for row in rows] == ["NAME", *IN_TREE]
    assert done.stderr == ""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on this process's path; modules imported from it are forgotten afterwards."""
    for variable in [v for v in os.environ if v.startswith("HAL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def plugins(site: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Write one module per text and make HAL_PLUGINS list exactly those."""
    for module, text in texts.items():
        (site / f"{module}.py").write_text(text)
    monkeypatch.setenv("HAL_PLUGINS", ",".join(texts))


def one(site: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Backend:
    """The only backend, loaded from ``text``."""
    plugins(site, monkeypatch, acme_mod=text)
    (backend,) = load()
    return backend


def test_hal_plugins_lists_exactly_the_modules_and_takes_the_name_from_hal_info(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins(site, monkeypatch, m1=source(name="zeta"), m2=source(name="alpha"))
    assert [(b.name, b.origin, b.state) for b in load()] == [
        ("alpha", "HAL_PLUGINS=m2", "ready"),
        ("zeta", "HAL_PLUGINS=m1", "ready"),
    ]


@pytest.mark.usefixtures("site")
def test_hal_plugins_set_to_nothing_loads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "")
    assert list(load()) == []
    with pytest.raises(BackendError, match="auto: no backend can be used: no plugin is installed"):
        load().choose()


@pytest.mark.usefixtures("site")
def test_hal_plugins_with_text_that_is_no_module_is_a_broken_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "not/a/module")
    (backend,) = load()
    assert backend.state == "broken"
    assert "HAL_PLUGINS=not/a/module" in backend.why()
    assert "right is module or module:attribute" in backend.why()


def kernels_text(body: str, count: int = 1) -> str:
    return source(
        extra=RMS_NORM + body, register="@hookimpl\ndef hal_register(register):\n" + "    register(fast)\n" * count
    )


def test_kernels_are_registered_once_and_by_operator(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "CALLS = []\n" + kernels_text("").replace("    register(fast)", "    CALLS.append(1); register(fast)")
    backend = one(site, monkeypatch, text)
    first, second = backend.kernels(), backend.kernels()
    assert [k.name for k in first["rms_norm"]] == ["acme_mod:fast"]
    assert first is second
    assert sys.modules["acme_mod"].CALLS == [1]


SLOW = "\ndef slow(x, eps, weight): return x\n"
BAD_KERNELS = {
    "unknown operator": (
        'fast = kernel("rms_nrom")(fast.fn)',
        "operator rms_nrom, kernel acme_mod:fast: no operator is called 'rms_nrom' (did you mean 'rms_norm'?)",
    ),
    "operator version": (
        'fast = kernel("rms_norm", version=9)(fast.fn)',
        "operator rms_norm, kernel acme_mod:fast: implements version 9, the operator has version 1",
    ),
    "order of parameters": (
        SLOW + 'fast = kernel("rms_norm")(slow)',
        "kernel acme_mod:slow: parameters are (x, eps, weight), the operator's are (x, weight, eps)",
    ),
    "keyword-only parameter": (
        'def slow(x, weight, *, eps): return x\nfast = kernel("rms_norm")(slow)',
        "kernel acme_mod:slow: parameters are (x, weight, *, eps), the operator's are (x, weight, eps)",
    ),
    "evidence": (
        'fast = kernel("rms_norm", evidence="trust-me")(fast.fn)',
        "kernel acme_mod:fast: evidence is 'trust-me', right is one of hardware",
    ),
    "reproducibility": (
        'fast = kernel("rms_norm", reproducibility="R9")(fast.fn)',
        "kernel acme_mod:fast: reproducibility is 'R9', right is one of R0, R1, R2",
    ),
    "claim on an axis that no call has": (
        'fast = kernel("rms_norm", claim=Claim(axes={"Q": Range(max=8)}))(fast.fn)',
        "kernel acme_mod:fast: the claim names axis 'Q'; axes are",
    ),
    "claim on a tensor that no call has": (
        'fast = kernel("rms_norm", claim=Claim(layouts={"weights": "rows"}))(fast.fn)',
        "kernel acme_mod:fast: the claim names tensor 'weights' (did you mean 'weight'?)",
    ),
    "no kernel at all": ("fast = fast.fn", "register was given <function fast"),
}


@pytest.mark.parametrize("case", BAD_KERNELS)
def test_a_bad_kernel_makes_the_backend_broken_and_names_plugin_operator_and_kernel(
    case: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, cause = BAD_KERNELS[case]
    backend = one(site, monkeypatch, kernels_text(body))
    before = backend.state
    with pytest.raises(BackendError) as caught:
        backend.kernels()
    assert (before, backend.state) == ("ready", "broken")
    assert "plugin acme" in str(caught.value)
    assert cause in str(caught.value)


def test_a_kernel_registered_twice_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = one(site, monkeypatch, kernels_text("", count=2))
    with pytest.raises(BackendError, match="kernel acme_mod:fast: is registered twice"):
        backend.kernels()


def test_every_registration_error_is_collected(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'fast = kernel("rms_norm", version=9, evidence="trust-me")(fast.fn)'
    text = kernels_text(body).replace("register(fast)", "register(fast); register(None); raise OSError('no libacme')")
    backend = one(site, monkeypatch, text)
    with pytest.raises(BackendError) as caught:
        backend.kernels()
    assert len(backend.errors) == 4
    for cause in ("version 9", "trust-me", "register was given None", "no libacme"):
        assert cause in str(caught.value)


def test_what_hal_register_raises_is_the_plugins_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register = "@hookimpl\ndef hal_register(register): print('loading'); raise OSError('no libacme')\n"
    backend = one(site, monkeypatch, source(register=register))
    with pytest.raises(BackendError, match="backend acme is broken: plugin acme: hal_register: OSError: no libacme"):
        backend.kernels()
    assert backend.notes[0] == "printed while registering: loading"
    assert "Traceback" in backend.notes[1]


def test_evidence_may_name_a_chip_or_a_target(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'fast = kernel("rms_norm", evidence="compiled-only(gfx942)")(fast.fn)'
    assert one(site, monkeypatch, kernels_text(body)).kernels()["rms_norm"][0].evidence == "compiled-only(gfx942)"


def test_an_absent_backend_registers_only_by_force(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = one(site, monkeypatch, kernels_text("").replace(PROBE.format(name="acme"), ABSENT))
    with pytest.raises(BackendError, match="acme is absent: no Acme card in the slot; insert one"):
        backend.kernels()
    assert list(backend.kernels(force=True)) == ["rms_norm"]


def test_a_device_is_opened_by_its_probed_index_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = one(site, monkeypatch, source())
    services: Any = backend.device(3)
    assert services == ("services", 3)
    with pytest.raises(BackendError, match="acme: device 0 is not among those probed: 3"):
        backend.device(0)


def test_a_device_hook_that_returns_nothing_breaks_its_contract(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = one(site, monkeypatch, source(device="@hookimpl\ndef hal_device(index): pass\n"))
    with pytest.raises(ContractError, match="plugin acme: hal_device\\(3\\) returned None"):
        backend.device(3)


def test_optional_hooks(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = one(site, monkeypatch, source())
    assert (plain.weight_formats("a1"), plain.tuning_space("rms_norm")) == ({}, {})
    extra = "@hookimpl\ndef hal_weight_formats(arch): return {'fp4': (arch, 'fp8')}\n"
    (site / "other.py").write_text(source(extra=extra))
    monkeypatch.setenv("HAL_PLUGINS", "other")
    (told,) = load()
    assert told.weight_formats("a1") == {"fp4": ("a1", "fp8")}


CPU = source(name="cpu", rank=-1)
ACME = source()
BCME = source(name="bcme")


def test_auto_prefers_a_chip_to_the_embedded_cpu_whatever_the_order(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins(site, monkeypatch, m1=CPU, m2=ACME)
    for order in ("m1,m2", "m2,m1"):
        monkeypatch.setenv("HAL_PLUGINS", order)
        choice = load().choose()
        assert (choice.backend.name, choice.device, choice.skipped) == ("acme", 3, ())
        assert choice.why == "auto: acme has the highest rank, 0, among the backends with a device"


def test_auto_says_one_line_for_each_backend_that_it_skips(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "m1": CPU,
        "m2": "raise ImportError('libacme.so')",
        "m3": source(name="bcme", probe=ABSENT),
        "m4": source(name="ccme", maturity="designed-for"),
        "m5": source(name="dcme", register="@hookimpl\ndef hal_register(register): raise OSError('no driver')\n"),
    }
    plugins(site, monkeypatch, **texts)
    choice = load().choose("auto")
    assert choice.backend.name == "cpu"
    bcme, ccme, dcme, m2 = choice.skipped
    assert bcme == "bcme skipped, absent: no Acme card in the slot; insert one"
    assert ccme.startswith("ccme skipped: designed for its chip, not chosen automatically")
    assert dcme == "dcme skipped, broken: plugin dcme: hal_register: OSError: no driver"
    assert m2 == "m2 skipped, broken: import of m2: ImportError: libacme.so"


def test_auto_asks_when_two_vendors_have_a_device(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins(site, monkeypatch, m1=ACME, m2=BCME, m3=CPU)
    with pytest.raises(BackendError, match=r"acme \(acme chip\), bcme \(bcme chip\); choose with --backend"):
        load().choose()
    assert load().choose("bcme").backend.name == "bcme"


def test_the_flag_precedes_the_variable_which_precedes_auto(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins(site, monkeypatch, m1=ACME, m2=BCME, m3=CPU)
    monkeypatch.setenv("HAL_BACKEND", "cpu")
    assert (load().choose().backend.name, load().choose().why) == ("cpu", "HAL_BACKEND=cpu")
    assert (load().choose("acme").backend.name, load().choose("acme").why) == ("acme", "--backend acme")


def test_an_unknown_name_gets_those_known_and_a_suggestion(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins(site, monkeypatch, m1=ACME, m2=CPU)
    with pytest.raises(BackendError) as caught:
        load().choose("acne")
    assert str(caught.value) == (
        "--backend acne: no backend 'acne' (did you mean 'acme'?); known are acme (ready), cpu (ready) "
        "(HAL_PLUGINS=m1,m2 limits them)"
    )
    monkeypatch.setenv("HAL_BACKEND", "quantum")
    with pytest.raises(BackendError, match=r"^HAL_BACKEND=quantum: no backend 'quantum'; known are"):
        load().choose()


def test_a_broken_or_absent_backend_chosen_by_name_stops_with_all_reasons(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins(site, monkeypatch, m1=CPU, m2="raise ImportError('libacme.so')", m3=source(name="bcme", probe=ABSENT))
    with pytest.raises(BackendError, match="--backend m2: backend m2 is broken: import of m2: ImportError: libacme"):
        load().choose("m2")
    with pytest.raises(BackendError, match="--backend bcme: backend bcme is absent: no Acme card in the slot"):
        load().choose("bcme")


def test_auto_without_any_device_gives_every_reason(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins(site, monkeypatch, m1="raise ImportError('libacme.so')", m2=source(name="bcme", probe=ABSENT))
    with pytest.raises(BackendError, match=r"bcme skipped, absent: no Acme card.*; m1 skipped, broken: .*libacme\.so"):
        load().choose()


def test_operators_come_from_the_variable_and_a_missing_module_is_named(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "acme_ops.py").write_text("LOADED = True\n")
    monkeypatch.setenv("HAL_OPERATORS", "acme_ops")
    load_operators()
    assert sys.modules["acme_ops"].LOADED
    monkeypatch.setenv("HAL_OPERATORS", "acme_ops_gone")
    with pytest.raises(ContractError, match="HAL_OPERATORS=acme_ops_gone: ModuleNotFoundError"):
        load_operators()
    monkeypatch.setenv("HAL_OPERATORS", "acme/ops")
    with pytest.raises(UsageError, match=r"HAL_OPERATORS=acme/ops: .* right is module or module:attribute"):
        load_operators()


def test_without_installed_metadata_the_frameworks_own_operators_are_declared(tmp_path: Path) -> None:
    script = """
        import sys
        import hal.plugins
        hal.plugins.entries = lambda group, variable: ()
        hal.plugins.load_operators()
        print(sorted({"hal_ops", "hal_model.layers"} & set(sys.modules)))
    """
    assert python(tmp_path, "-c", textwrap.dedent(script)).stdout == "['hal_model.layers', 'hal_ops']\n"


@pytest.mark.parametrize("bad", ["1", "1.x", 1, (1,), (1, 0, 0), ("1", "0")])
def test_an_api_version_is_two_numbers(bad: Any) -> None:
    with pytest.raises(ContractError, match="right is"):
        parse_version(bad)


def test_info_and_probe_name_the_field_that_is_wrong() -> None:
    assert Info("acme", "Acme", ((1, 0), "1.2")).window == ((1, 0), (1, 2))
    with pytest.raises(ContractError, match=r"Info\.name is 'auto'"):
        Info("auto", "Acme", ("1.0", "1.0"))
    with pytest.raises(ContractError, match=r"Info\.api is .* lowest version first"):
        Info("acme", "Acme", ("1.1", "1.0"))
    with pytest.raises(ContractError, match=r"Info\.stands_on is 'triton'"):
        Info("acme", "Acme", ("1.0", "1.0"), stands_on="triton")  # type: ignore[arg-type]
    card = DeviceInfo(0, "card", "a1", 0)
    with pytest.raises(ContractError, match=r"indices \[0, 0\]"):
        Probe((card, card))


def test_captured_output_returns_to_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    with captured() as out:
        os.write(1, b"inside\n")
    os.write(1, b"outside\n")
    print("python outside")
    assert out == ["inside"]
    assert capfd.readouterr().out == "outside\npython outside\n"
