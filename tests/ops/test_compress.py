"""Compression at every split into steps against a loop over all tokens (spec §2.6, §5.3; B24, B34, B83; kind K6).

The oracle knows no state: it pools entry j from the whole sequence. Whatever the steps, the operator must agree.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hal_ops import compress, compress_entries, fake_quant_fp4, fake_quant_fp8, generator, hadamard
from hal_ops.rotary import frequencies

F64 = torch.float64
NAN = math.nan


@dataclass(frozen=True)
class Kind:
    """One compressor: ratio, lanes and entry width."""

    r: int
    lanes: int
    w: int


CSA, HCA = Kind(4, 2, 3), Kind(128, 1, 2)


@dataclass
class Sequence:
    """Raw rows of one sequence, and how many tokens its compressor has seen."""

    kind: Kind
    a: Tensor
    g: Tensor
    ape: Tensor
    slot: int
    seen: int = 0
    entries: list[Tensor] = field(default_factory=list)


def sequence(kind: Kind, length: int, key: str = "s", slot: int = 1) -> Sequence:
    width = kind.lanes * kind.w
    a, g = (
        generator.normal(f"{key}/a", (length, width)).double(),
        generator.normal(f"{key}/g", (length, width)).double(),
    )
    return Sequence(kind, a, g * 2, generator.normal("ape", (kind.r, width)).double(), slot)


def dirty(kind: Kind, slots: int = 3, ring: int | None = None) -> Tensor:
    """A state nobody has cleared: what a new sequence finds never matters."""
    return torch.full((slots, ring or kind.lanes * kind.r, 2 * kind.lanes * kind.w), NAN, dtype=F64)


def pool(s: Sequence, j: int) -> list[float]:
    """Entry j: per channel, a softmax over its window (and lane A of the window before)."""
    r, w = s.kind.r, s.kind.w
    members = [(t, (s.kind.lanes - 1) * w) for t in range(r * j, r * (j + 1))]
    if s.kind.lanes == 2:
        members += [(t, 0) for t in range(r * (j - 1), r * j) if t >= 0]
    out = []
    for c in range(w):
        logits = [float(s.g[t, lane + c] + s.ape[t % r, lane + c]) for t, lane in members]
        e = [math.exp(v - max(logits)) for v in logits]
        values = [float(s.a[t, lane + c]) for t, lane in members]
        out.append(math.fsum(p * v for p, v in zip(e, values, strict=True)) / math.fsum(e))
    return out


def step(state: Tensor, parts: list[tuple[Sequence, int]], padding: int = 0) -> None:
    """One step: the next ``count`` tokens of each sequence, packed one after another."""
    kind, dev = parts[0][0].kind, []
    owner: list[Sequence] = []
    for s, count in parts:
        for i in range(count):
            dev.append((s.slot, s.seen + i, i))
            owner.append(s)
    slots, positions, offsets = torch.tensor(dev, dtype=torch.int64).view(-1, 3).unbind(1)
    closing = [i for i, (_, p, _) in enumerate(dev) if (p + 1) % kind.r == 0]
    a = torch.cat([s.a[s.seen : s.seen + n] for s, n in parts])
    g = torch.cat([s.g[s.seen : s.seen + n] for s, n in parts])
    marks = torch.tensor(closing + [-1] * padding, dtype=torch.int64)
    out = compress(a, g, parts[0][0].ape, state, slots, positions, offsets, marks, kind.lanes, F64)
    assert out.shape == (len(closing) + padding, kind.w)
    assert bool((out[len(closing) :] == 0).all())
    for row, i in zip(out, closing, strict=False):
        owner[i].entries.append(row)
    for s, n in parts:
        s.seen += n


def check(s: Sequence) -> None:
    assert len(s.entries) == s.seen // s.kind.r
    for j, row in enumerate(s.entries):
        assert row.tolist() == pytest.approx(pool(s, j), abs=1e-13), f"entry {j}"


def run(s: Sequence, cuts: tuple[int, ...], ring: int | None = None) -> Tensor:
    """Feed ``s`` in the chunks between ``cuts``; returns the state afterwards."""
    state = dirty(s.kind, ring=ring)
    for start, end in itertools.pairwise((0, *cuts, len(s.a))):
        step(state, [(s, end - start)])
    return state


def splits(length: int, places: list[int]) -> list[tuple[int, ...]]:
    """Every way to cut at up to two of ``places``, so into three chunks at most."""
    inside = [p for p in places if 0 < p < length]
    return [c for n in (0, 1, 2) for c in itertools.combinations(inside, n)]


@pytest.mark.parametrize("length", range(1, 14))
def test_b24_every_split_of_a_short_sequence_at_ratio_4(length: int) -> None:
    whole = run(sequence(CSA, length), ())
    for cuts in splits(length, list(range(1, length))):
        s = sequence(CSA, length)
        state = run(s, cuts)
        check(s)
        assert torch.equal(state.nan_to_num(7), whole.nan_to_num(7)), cuts


@pytest.mark.parametrize("length", [127, 128, 129, 256, 257, 300])
def test_k6_every_split_near_multiples_of_128_at_ratio_128(length: int) -> None:
    places = [1, 126, 127, 128, 129, 130, 255, 256, 257]
    whole = run(sequence(HCA, length), ())
    for cuts in splits(length, places):
        s = sequence(HCA, length)
        state = run(s, cuts)
        assert len(s.entries) == length // 128
        assert torch.equal(state.nan_to_num(7), whole.nan_to_num(7)), cuts
    check(s)


@pytest.mark.parametrize("length", [127, 128, 129, 261])
def test_k6_splits_near_multiples_of_4_and_128_at_ratio_4(length: int) -> None:
    places = [3, 4, 5, 7, 8, 9, 124, 127, 128, 129, 132, 255, 256, 257]
    whole = sequence(CSA, length)
    run(whole, ())
    check(whole)
    for cuts in splits(length, places):
        s = sequence(CSA, length)
        run(s, cuts)
        right = torch.stack(whole.entries)
        assert torch.allclose(torch.stack(s.entries), right, rtol=0, atol=1e-14), cuts


@pytest.mark.parametrize(("kind", "length"), [(CSA, 21), (HCA, 258)])
def test_token_by_token_equals_one_step(kind: Kind, length: int) -> None:
    s = sequence(kind, length)
    run(s, tuple(range(1, length)))
    check(s)


@pytest.mark.parametrize("ring", [8, 9, 11, 64])
def test_a_longer_ring_changes_nothing(ring: int) -> None:
    for cuts in ((), (5,), (3, 10), (9, 17)):
        s = sequence(CSA, 26)
        state = run(s, cuts, ring)
        check(s)
        for t in range(max(0, 26 - ring), 26):
            raw = torch.cat((s.a[t], s.g[t] + s.ape[t % 4]))
            assert torch.equal(state[1, t % ring], raw)


@pytest.mark.parametrize("lengths", [(3, 5), (4, 4), (7, 1), (1, 9), (8, 12)])
@pytest.mark.parametrize("kind", [CSA, HCA], ids=["csa", "hca"])
def test_b24_packed_sequences_equal_their_solo_runs(kind: Kind, lengths: tuple[int, int]) -> None:
    scale = kind.r // 4
    first, second = sequence(kind, lengths[0] * scale, "A", 2), sequence(kind, lengths[1] * scale, "B", 0)
    state = dirty(kind)
    step(state, [(first, len(first.a)), (second, len(second.a))])
    check(first)
    check(second)
    for s in (first, second):
        alone = sequence(kind, len(s.a), "A" if s is first else "B", s.slot)
        assert torch.equal(run(alone, ())[s.slot].nan_to_num(7), state[s.slot].nan_to_num(7))
    assert bool(state[1].isnan().all())


def test_b83_a_slot_belongs_to_its_sequence_not_to_a_place_in_the_batch() -> None:
    state = dirty(CSA, 4)
    a, b, c, d = (sequence(CSA, 20, key, slot) for slot, key in enumerate("abcd"))
    step(state, [(a, 6), (b, 3), (c, 9)])
    step(state, [(c, 1), (b, 1), (a, 1)])
    d.slot = a.slot  # A leaves half-way through a window, D takes its slot
    step(state, [(b, 4), (d, 5), (c, 2)])
    step(state, [(d, 4), (c, 1), (b, 1)])
    for s in (a, b, c, d):
        check(s)
    assert [len(s.entries) for s in (a, b, c, d)] == [1, 2, 3, 2]


@pytest.mark.parametrize("kind", [CSA, HCA], ids=["csa", "hca"])
def test_b34_rows_appear_exactly_at_multiples_of_the_ratio(kind: Kind) -> None:
    for length in (1, 3, 4, 5, 127, 128, 129):
        s = sequence(kind, length)
        run(s, ())
        assert (
            len(s.entries)
            == {4: [0, 0, 1, 1, 31, 32, 32], 128: [0, 0, 0, 0, 0, 1, 1]}[kind.r][
                [1, 3, 4, 5, 127, 128, 129].index(length)
            ]
        )


def test_the_first_window_has_no_predecessor() -> None:
    """Value 0 at score −inf, so weight 0: with equal scores entry 0 is the mean of 4 rows, entry 1 of 8."""
    s = sequence(CSA, 8)
    s.g.zero_()
    s.ape.zero_()
    run(s, ())
    assert torch.allclose(s.entries[0], s.a[:4, 3:].mean(0), rtol=0, atol=1e-15)
    eight = torch.cat((s.a[:4, :3], s.a[4:, 3:]))
    assert torch.allclose(s.entries[1], eight.mean(0), rtol=0, atol=1e-15)


def test_padding_rows_give_zeros_and_no_tokens_change_nothing() -> None:
    s, state = sequence(CSA, 9), dirty(CSA)
    step(state, [(s, 9)], padding=2)
    check(s)
    before = state.clone()
    step(state, [(s, 0)], padding=3)
    step(state, [(s, 0)])
    assert torch.equal(state.nan_to_num(7), before.nan_to_num(7))


def test_scores_of_any_size_stay_finite() -> None:
    s = sequence(CSA, 12)
    s.g *= 500
    run(s, (5,))
    check(s)
    assert all(bool(e.isfinite().all()) for e in s.entries)


def test_float32_pools_within_its_precision() -> None:
    for kind in (CSA, HCA):
        s = sequence(kind, 2 * kind.r)
        marks = torch.tensor([kind.r - 1, 2 * kind.r - 1])
        t = torch.arange(2 * kind.r)
        state = dirty(kind).float()
        args = (s.a.float(), s.g.float(), s.ape.float(), state, t * 0, t, t, marks, kind.lanes, torch.float32)
        out = compress(*args)
        assert out.dtype == torch.float32
        assert [v for row in out.tolist() for v in row] == pytest.approx(pool(s, 0) + pool(s, 1), abs=2e-6)


# Entries ------------------------------------------------------------------------------------------------------------


def entry(pooled: list[float], norm: Tensor, position: int, freqs: Tensor) -> Tensor:
    """Norm, then rotation of the last pairs at ``position``."""
    rho = 1 / math.sqrt(math.fsum(v * v for v in pooled) / len(pooled) + 1e-6)
    row = [v * rho * w for v, w in zip(pooled, norm.tolist(), strict=True)]
    start = len(row) - 2 * len(freqs)
    for i, f in enumerate(freqs):
        angle = float(torch.tensor(float(position)) * f)
        x, y = row[start + 2 * i], row[start + 2 * i + 1]
        row[start + 2 * i] = x * math.cos(angle) - y * math.sin(angle)
        row[start + 2 * i + 1] = x * math.sin(angle) + y * math.cos(angle)
    return torch.tensor(row, dtype=F64)


@pytest.mark.parametrize("form", ["plain", "kv", "index"])
@pytest.mark.parametrize("kind", [Kind(4, 2, 128), Kind(128, 1, 128)], ids=["csa", "hca"])
def test_b13_entries_are_rotated_at_the_first_token_of_their_window(kind: Kind, form: str) -> None:
    length, start = 3 * kind.r, 0
    s, freqs = sequence(kind, length), frequencies(64, 160_000.0)
    norm = generator.normal("norm", (kind.w,)).double() * 0.1 + 1
    t = torch.arange(start, length)
    marks = torch.tensor([kind.r - 1, 3 * kind.r - 1, -1])
    rows = (s.a, s.g, s.ape, dirty(kind), t * 0 + 1, t, t, marks)
    seen = compress_entries(*rows, kind.lanes, F64, norm, freqs, 1e-6, form)
    for row, j in zip(seen, (0, 2), strict=False):
        right = entry(pool(s, j), norm, kind.r * j, freqs)
        if form == "kv":
            assert torch.allclose(row[64:], right[64:], rtol=0, atol=1e-12)
            right = torch.cat((fake_quant_fp8(right[None, :64], 64)[0], right[64:]))
        elif form == "index":
            right = fake_quant_fp4(hadamard(right[None]), 32)[0]
        assert torch.allclose(row, right, rtol=0, atol=1e-12)
    assert bool((seen[2] == 0).all())


def test_entries_of_no_tokens() -> None:
    kind = Kind(4, 2, 128)
    s, none = sequence(kind, 0), torch.zeros(0, dtype=torch.int64)
    args = (s.a, s.g, s.ape, dirty(kind), none, none, none)
    for closing in (none, torch.tensor([-1, -1])):
        rest = (2, torch.bfloat16, torch.ones(128), frequencies(64, 1e4), 1e-6, "kv")
        assert compress_entries(*args, closing, *rest).tolist() == [[0.0] * 128] * len(closing)
