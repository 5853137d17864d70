"""The CPU's plugin: found through the host's own door, light to import, and nobody's first choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hal import plugins
from hal.device import DeviceServices
from hal.plugin import Probe
from hal_cpu import features, plugin


@pytest.fixture(scope="module")
def backend() -> plugins.Backend:
    found = [b for b in plugins.load() if b.name == "cpu"]
    assert len(found) == 1
    return found[0]


def test_it_is_ready_on_every_machine(backend: plugins.Backend) -> None:
    assert (backend.state, backend.why()) == ("ready", "")
    assert backend.info is not None
    assert (backend.info.rank, backend.info.maturity) == (-1, "supported")


def test_the_probe_says_what_the_device_says(backend: plugins.Backend) -> None:
    assert backend.probe is not None
    (device,) = backend.probe.devices
    services = backend.device(0)
    assert isinstance(services, DeviceServices)
    facts = services.facts()
    assert (device.name, device.arch, device.memory_bytes) == (facts.name, facts.arch, facts.memory_bytes)


def test_importing_and_probing_loads_no_torch() -> None:
    code = (
        "import sys, json\n"
        "from hal_cpu import plugin\n"
        "probe = plugin.hal_probe()\n"
        "info, formats = plugin.hal_info(), plugin.hal_weight_formats(probe.devices[0].arch)\n"
        "print(json.dumps([info.name, len(probe.devices), sorted(formats), 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert json.loads(done.stdout) == ["cpu", 1, ["dense_dtype", "fp4", "fp8", "wide"], False]


def test_a_system_without_proc_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = features.total_memory
    monkeypatch.setattr(features, "total_memory", lambda: original(tmp_path))
    probe = plugin.hal_probe()
    assert isinstance(probe, Probe)
    assert probe.devices == ()
    assert "MemTotal is missing; right is a Linux system with /proc" in probe.reasons[0]


@pytest.mark.parametrize("arch", [*features.X86_LEVELS, "aarch64"])
def test_decoded_weights_are_wanted_first_and_as_stored_second(backend: plugins.Backend, arch: str) -> None:
    formats = backend.weight_formats(arch)
    assert formats["fp8"] == ("dense", "fp8")
    assert formats["fp4"] == ("dense", "fp4")
    assert formats["wide"] == ("float32",)
    assert formats["dense_dtype"] == ("bfloat16", "float32")


def test_every_kernel_registers_without_an_error(backend: plugins.Backend) -> None:
    kernels = backend.kernels()
    assert backend.errors == ()
    assert {"fake_quant_fp8", "linear_dense", "matmul_fp4", "sparse_attention", "sample"} <= set(kernels)
    labels = {(k.evidence, k.graph) for found in kernels.values() for k in found}
    assert labels == {("hardware", False)}  # the CPU has no device graphs
