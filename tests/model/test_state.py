"""State of running sequences: any split into steps, any company in the batch and any stale memory give the same logits.

The model is the structural one in float32 (mode A of spec A.2), where products of other shapes differ by rounding only:
``WITHIN`` is spec §5.3's 1e-5.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.errors import ContractError, MemoryLimitError, UsageError
from hal_cpu.device import CpuDevice
from hal_model.config import PRESETS
from hal_model.model import Model
from hal_model.state import WINDOW_PAGE, Limits, State, state_bytes
from hal_model.state import Sequence as Running

WITHIN = 1e-5
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257)
LONGEST = max(LENGTHS)

StateOf = Callable[..., State]
Step = Callable[[Model, State, list[tuple[Running, list[int]]]], Tensor]
Chunked = Callable[[Model, State, Sequence[int], Sequence[int]], Tensor]

pytestmark = pytest.mark.usefixtures("unchecked")


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return prompt(7, LONGEST)


@pytest.fixture(scope="module")
def whole(structural: Model, state_of: StateOf, chunked: Chunked, ids: list[int]) -> Tensor:
    """Logits of ``ids`` in one step; causality makes its head the logits of every shorter prompt."""
    return chunked(structural, state_of(structural), ids, ())


@pytest.fixture(scope="module")
def state(structural: Model, state_of: StateOf) -> State:
    return state_of(structural, Limits(4, 512, 512))


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference; shapes must agree."""
    assert a.shape == b.shape
    return float((a - b).abs().max())


# --- chunks (fault kind K6)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A length and up to three cuts in it, mostly near multiples of 4, 16 and 128."""
    length = draw(st.sampled_from(LENGTHS))
    near = st.sampled_from([m + d for m in (4, 8, 16, 128, 256) for d in (-1, 0, 1)])
    cuts = draw(st.sets(st.one_of(near, st.integers(1, LONGEST)), max_size=3))
    return length, sorted(c for c in cuts if c < length)


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(split=splits())
def test_any_split_gives_the_logits_of_one_step(
    structural: Model, state: State, chunked: Chunked, ids: list[int], whole: Tensor, split: tuple[int, list[int]]
) -> None:
    length, cuts = split
    assert apart(chunked(structural, state, ids[:length], cuts), whole[:length]) <= WITHIN


def held(state: State, seq: Running) -> list[Tensor]:
    """Everything that a sequence's past is worth to its future, layer by layer: window rows, entries, index rows."""
    window = range(max(0, seq.length - state.config.sliding_window + 1), seq.length)
    out = []
    for cache, ratio in zip(state.caches, state.config.compress_ratios, strict=False):
        out.append(cache.window[[seq.window[t // WINDOW_PAGE] * WINDOW_PAGE + t % WINDOW_PAGE for t in window]])
        if ratio:
            page = 64 if ratio == 4 else 8
            rows = [seq.entries[ratio][j // page] * page + j % page for j in range(seq.length // ratio)]
            out += [pool[rows] for pool in (cache.entries, cache.index) if pool is not None]
    return out


@pytest.mark.parametrize("cuts", [(1,), (3, 4, 130), (127, 128, 255), (90, 180)])
def test_any_split_leaves_the_same_rows(
    structural: Model, state_of: StateOf, step: Step, ids: list[int], cuts: tuple[int, ...]
) -> None:
    states = [state_of(structural, Limits(1, 512, 512)) for _ in range(2)]
    seqs = [s.open() for s in states]
    step(structural, states[0], [(seqs[0], ids)])
    for a, b in zip([0, *cuts], [*cuts, LONGEST], strict=True):
        step(structural, states[1], [(seqs[1], ids[a:b])])
    pairs = zip(held(states[0], seqs[0]), held(states[1], seqs[1]), strict=True)
    assert max(apart(x, y) for x, y in pairs) <= WITHIN


# --- company in the batch


def test_sequences_stepping_together_equal_solo_runs(
    structural: Model, state: State, step: Step, chunked: Chunked
) -> None:
    """One decodes past a window boundary while others prefill whole, in chunks, and by one token."""
    plans = {1: [14, 1, 1, 1], 2: [1, 130, 3, 1], 3: [5, 2, 126, 4], 4: [64, 64, 1, 2]}
    prompts = {seed: prompt(seed, sum(sizes)) for seed, sizes in plans.items()}
    seqs = {seed: state.open() for seed in plans}
    got: dict[int, list[Tensor]] = {seed: [] for seed in plans}
    for i in range(4):
        order = list(plans) if i % 2 else list(reversed(plans))
        batch = [(seqs[s], prompts[s][sum(plans[s][:i]) : sum(plans[s][: i + 1])]) for s in order]
        parts = torch.split_with_sizes(step(structural, state, batch), [plans[s][i] for s in order])
        for s, part in zip(order, parts, strict=True):
            got[s].append(part)
    for s in plans:
        state.close(seqs[s])
        assert apart(torch.cat(got[s]), chunked(structural, state, prompts[s], ())) <= WITHIN


def test_removal_admission_and_reordering_do_not_mix_sequences(
    structural: Model, state_of: StateOf, step: Step, chunked: Chunked
) -> None:
    """Fault B83: A (6 tokens done), B (3), C (9) decode; A leaves, D enters, the order turns, B is put out and in again."""
    state = state_of(structural, Limits(3, 64, 64))
    text = {name: prompt(i, 24) for i, name in enumerate("abcd")}
    running: dict[str, Running] = {}
    solo = {name: chunked(structural, state, text[name], ()) for name in text}

    def check(names: str, count: int = 1) -> None:
        batch, right = [], []
        for name in names:
            seq = running[name]
            batch.append((seq, text[name][seq.length : seq.length + count]))
            right.append(solo[name][seq.length : seq.length + count])
        assert apart(step(structural, state, batch), torch.cat(right)) <= WITHIN

    def admit(name: str, count: int) -> None:
        running[name] = state.open()
        check(name, count)

    for name, count in (("a", 6), ("b", 3), ("c", 9)):
        admit(name, count)
    check("abc")
    state.close(running.pop("a"))
    admit("d", 2)
    check("dcb")
    check("bcd", 3)
    done = running["b"].length
    state.close(running.pop("b"))
    check("dc", 2)
    admit("b", done)
    for _ in range(4):
        check("cbd")


# --- stale memory (fault kind K15)


def test_memory_of_former_owners_never_reaches_a_logit(
    structural: Model, state_of: StateOf, chunked: Chunked, ids: list[int]
) -> None:
    runs = []
    for filler in (0.0, float("nan"), 7.0):
        state = state_of(structural, Limits(2, 512, 512))
        for pool in state.pools.values():
            pool.storage.fill_(filler)
        runs.append(chunked(structural, state, ids, (130, 131, 132)))
        runs.append(chunked(structural, state, prompt(3, 40), range(1, 12)))
    for again in (2, 4):
        assert torch.equal(runs[again], runs[0])
        assert torch.equal(runs[again + 1], runs[1])


def test_a_used_slot_gives_the_bits_of_a_fresh_one(
    structural: Model, state_of: StateOf, chunked: Chunked, ids: list[int]
) -> None:
    """A prompt shorter than a compression window must not see the former owner's half-filled window (spec §5.2)."""
    state, fresh = state_of(structural, Limits(1, 512, 512)), state_of(structural, Limits(1, 512, 512))
    chunked(structural, state, ids[:255], ())
    short = prompt(5, 6)
    assert torch.equal(chunked(structural, state, short, (3,)), chunked(structural, fresh, short, (3,)))


# --- pages


def free(state: State) -> dict[str, int]:
    return {name: pool.allocator.free for name, pool in state.pools.items()}


def advance(state: State, batch: list[tuple[Running, list[int]]]) -> None:
    """A step without the model."""
    state.prepare(batch)
    state.commit(batch)


def test_closing_gives_back_every_page_and_the_slot(device: CpuDevice) -> None:
    state = State(PRESETS["tiny"], Limits(2, 512, 512), torch.float32, device)
    before, used = free(state), state.arena.used
    seqs = [state.open(), state.open()]
    advance(state, [(seqs[0], [1] * 300), (seqs[1], [1] * 5)])
    assert free(state)["window"] < before["window"]
    assert free(state)["csa"] == before["csa"] - 2 - 1
    for seq in seqs:
        state.close(seq)
    assert (free(state), state.arena.used) == (before, used)
    assert state.open().slot == 0


def test_window_pages_go_back_while_a_sequence_grows(device: CpuDevice) -> None:
    state = State(PRESETS["tiny"], Limits(1, 1024, 64), torch.float32, device)
    seq = state.open()
    for _ in range(16):
        advance(state, [(seq, [1] * 64)])
        assert len(seq.window) == 1  # 15 rows are still seen, all of the last page
    for n in range(0, 1024, 64):
        if n not in (960,):
            assert n // 64 not in seq.window
    assert len(seq.entries[4]) == 4
    assert len(seq.entries[128]) == 1


def rows_of(seq: Running) -> dict[str, set[int]]:
    csa, hca = set(seq.entries[4]), set(seq.entries[128])
    return {"window": set(seq.window.values()), "csa": csa, "index": csa, "hca": hca}


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(data=st.data())
def test_within_the_limits_pages_never_run_out_and_never_have_two_owners(device: CpuDevice, data: Any) -> None:
    limits = Limits(3, 384, 200)
    state = State(PRESETS["tiny"], limits, torch.float32, device)
    before, running = free(state), list[Running]()
    for _ in range(data.draw(st.integers(5, 15))):
        if len(running) < 3 and data.draw(st.booleans()):
            running.append(state.open())
        room, batch = limits.max_step_tokens, []
        for seq in data.draw(st.permutations(running)):
            most = min(room, limits.max_seq_len - seq.length)
            count = data.draw(st.sampled_from([0, 1, 1, 63, 64, 65, 128, most]))
            if 0 < count <= most:
                batch.append((seq, [1] * count))
                room -= count
        if batch:
            advance(state, batch)
        for name in ("window", "csa", "hca"):
            owned = [rows_of(seq)[name] for seq in running]
            assert len(set().union(*owned)) == sum(map(len, owned))
            assert 0 not in set().union(*owned)
        if running and data.draw(st.booleans()):
            state.close(running.pop(data.draw(st.integers(0, len(running) - 1))))
    for seq in running:
        state.close(seq)
    assert free(state) == before


def test_state_bytes_tells_what_the_arena_takes(device: CpuDevice) -> None:
    limits = Limits(3, 300, 64)
    state = State(PRESETS["tiny"], limits, torch.bfloat16, device)
    assert state.arena.capacity == state_bytes(PRESETS["tiny"], limits, torch.bfloat16)
    assert state.arena.unassigned == 0


# --- refusals


@pytest.fixture
def small(device: CpuDevice) -> State:
    return State(PRESETS["tiny"], Limits(2, 100, 50), torch.float32, device)


def test_a_sequence_beyond_max_seq_len_is_refused(small: State) -> None:
    seq = small.open()
    for _ in range(2):
        advance(small, [(seq, [1] * 50)])
    with pytest.raises(UsageError, match="sequence of 101 tokens exceeds max_seq_len 100"):
        small.prepare([(seq, [1])])


def test_a_step_beyond_max_step_tokens_is_refused(small: State) -> None:
    batch = [(small.open(), [1] * 30), (small.open(), [1] * 21)]
    with pytest.raises(UsageError, match="step of 51 tokens exceeds max_step_tokens 50"):
        small.prepare(batch)


def test_one_sequence_too_many_is_refused(small: State) -> None:
    small.open(), small.open()
    with pytest.raises(UsageError, match=r"max_batch_size 2: all slots are in use; raise --max-batch-size"):
        small.open()


def test_a_sequence_without_a_new_token_is_refused(small: State) -> None:
    with pytest.raises(UsageError, match="slot 0 has no new token"):
        small.prepare([(small.open(), [])])


@pytest.mark.parametrize("pool", ["window", "csa", "hca"])
def test_out_of_pages_names_pool_and_flag_and_takes_nothing(device: CpuDevice, pool: str) -> None:
    state = State(PRESETS["tiny"], Limits(2, 512, 512), torch.float32, device)
    allocator = state.pools[pool].allocator
    rest = allocator.take(allocator.free)
    before, seq = free(state), state.open()
    with pytest.raises(MemoryLimitError, match=rf"pool {pool}: .* needed, 0 free; change .*--max-seq-len"):
        state.prepare([(seq, [1] * 130)])
    assert free(state) == before
    allocator.give(rest)
    advance(state, [(seq, [1] * 130)])
    assert seq.length == 130


def test_a_closed_sequence_is_refused(small: State) -> None:
    """Else its slot would be handed out twice, and two sequences would share compressor rows."""
    seq = small.open()
    small.close(seq)
    with pytest.raises(ContractError, match="closed"):
        small.close(seq)
    with pytest.raises(ContractError, match="closed"):
        small.prepare([(seq, [1])])


def test_a_sequence_twice_in_one_step_is_refused(small: State) -> None:
    seq = small.open()
    with pytest.raises(ContractError, match="slot 0 is in the step twice"):
        small.prepare([(seq, [1]), (seq, [2])])
