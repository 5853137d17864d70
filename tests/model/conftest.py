"""Shared parts of the model's tests: tiny checkpoints on disk, models on the CPU, and ways to run them.

Steps run the references: no plan is active, so every call is checked against its contract, unless ``unchecked``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.operator import OPERATORS, Operator, routes
from hal_cpu.device import CpuDevice
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS, ModelConfig
from hal_model.load import Wanted, load_weights
from hal_model.model import Model, Numerics, backbone, head
from hal_model.state import Limits, State
from hal_model.state import Sequence as Running
from hal_model.tokenizer import write_byte_tokenizer

Batch = list[tuple[Running, list[int]]]
Calls = dict[str, list[tuple[tuple[Any, ...], Any]]]
Open = Callable[..., Model]
StateOf = Callable[..., State]
Step = Callable[[Model, State, Batch], Tensor]
Chunked = Callable[[Model, State, Sequence[int], Sequence[int]], Tensor]


@pytest.fixture(scope="session")
def device() -> CpuDevice:
    return CpuDevice()


@pytest.fixture(scope="session")
def golden_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of spec A.1, every float tensor stored in F32."""
    out = tmp_path_factory.mktemp("golden-f32") / "tiny"
    init_checkpoint(PRESETS["tiny"], out, experts="f32", dense="f32", initializer="golden")
    return out


@pytest.fixture(scope="session")
def quantised_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of spec A.4: routed experts FP4, other linears FP8."""
    out = tmp_path_factory.mktemp("golden-fp4") / "tiny"
    init_checkpoint(PRESETS["tiny"], out, experts="fp4", dense="fp8", initializer="golden")
    return out


@pytest.fixture(scope="session")
def open_model(device: CpuDevice) -> Open:
    """``open_model(path, want, quantised_state)``: a model on the CPU with the carrier of ``want``."""

    def open_(path: Path, want: Wanted | None = None, quantised_state: bool = True) -> Model:
        config, want = ModelConfig.from_dir(path), want or Wanted(torch.float32)
        weights, _ = load_weights(config, Checkpoint.open(path), want, device)
        return Model.build(config, weights, Numerics(want.carrier, quantised_state), device.device)

    return open_


@pytest.fixture(scope="session")
def state_of(device: CpuDevice) -> StateOf:
    """``state_of(model, limits)``: fresh state for ``model``; two sequences of 1024 tokens by default."""

    def make(model: Model, limits: Limits | None = None) -> State:
        return State(model.config, limits or Limits(2, 1024, 1024), model.numerics.carrier, device)

    return make


@pytest.fixture(scope="session")
def structural(golden_checkpoint: Path, open_model: Open) -> Model:
    """Golden weights, float32 carrier, state rows not rounded: mode A of spec A.2."""
    return open_model(golden_checkpoint, quantised_state=False)


@pytest.fixture(scope="session")
def step() -> Step:
    """``step(model, state, batch)``: one committed step, logits [T, V] at every token of the batch."""

    def run(model: Model, state: State, batch: Batch) -> Tensor:
        laid_out = state.prepare(batch)
        with torch.inference_mode():
            out = head(model, backbone(model, state.caches, laid_out))
        state.commit(batch)
        return out

    return run


@pytest.fixture(scope="module")
def unchecked() -> Iterator[None]:
    """Run the bare references, as a plan would: checking every call's contract doubles the time of a decode step."""
    with routes([op.fn for op in OPERATORS.values()]):
        yield


@pytest.fixture(scope="session")
def chunked(step: Step) -> Chunked:
    """``chunked(model, state, ids, cuts)``: a new sequence in chunks that end at ``cuts``; closed afterwards."""

    def run(model: Model, state: State, ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
        seq, edges = state.open(), [0, *cuts, len(ids)]
        parts = [step(model, state, [(seq, list(ids[a:b]))]) for a, b in itertools.pairwise(edges)]
        state.close(seq)
        return torch.cat(parts)

    return run


@pytest.fixture(scope="session")
def recorded() -> Callable[[], contextlib.AbstractContextManager[Calls]]:
    """``with recorded() as calls``: arguments and output of every operator call inside, by operator, in order."""

    @contextlib.contextmanager
    def record() -> Iterator[Calls]:
        calls: Calls = defaultdict(list)

        def route(op: Operator[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                op.contract.call(args, kwargs)
                out = op.fn(*args, **kwargs)
                calls[op.name].append((args, out))
                return out

            return call

        with routes([route(op) for op in OPERATORS.values()]):
            yield calls

    return record


@pytest.fixture(scope="session")
def golden_ids() -> list[int]:
    """The 300 token ids of spec A.1."""
    return [((31 * t * t + 17 * t + 101) % 509) + 2 for t in range(300)]


# --- the command line

Done = subprocess.CompletedProcess[str]
Hal = Callable[..., Done]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache folder for all commands, so that the tiny checkpoint is made once."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}
    cache = str(tmp_path_factory.mktemp("cache"))
    return own | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


@pytest.fixture(scope="session")
def hal(environment: dict[str, str]) -> Hal:
    """``hal("plan", "--json")``: the command's exit code and what it printed."""

    def run(*args: str | Path, **kwargs: Any) -> Done:
        command = [sys.executable, "-m", "hal", *map(str, args)]
        base: dict[str, Any] = {"input": "", "env": environment, "timeout": 300}
        return subprocess.run(command, capture_output=True, text=True, check=False, **(base | kwargs))

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of each kind, with a tokenizer."""
    out = tmp_path_factory.mktemp("commands") / "small"
    three = replace(PRESETS["tiny"], num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128))
    config = replace(three, draft_ratios=(), num_nextn_predict_layers=0, n_routed_experts=4)
    init_checkpoint(config, out)
    write_byte_tokenizer(out, config.vocab_size)
    return out
