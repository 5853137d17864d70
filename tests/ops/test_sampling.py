"""Choosing the next token: exact distributions per option, seeds, penalties (spec §6.5; B57, B58, B74; kind K22)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hal_ops import generator, penalize, sample
from hal_ops.sampling import _exponential, exponential_noise

DRAWS = 10_000
PROBS = [0.3, 0.02, 0.25, 0.15, 0.1, 0.1, 0.05, 0.03]


def draw(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1
) -> Tensor:
    """One token per row of ``logits`` [B, V], every row with its own seed."""
    b = logits.shape[0]
    seeds = torch.arange(b) * 7919 + seed
    return sample(
        logits,
        torch.full((b,), temperature),
        torch.full((b,), top_k),
        torch.full((b,), top_p),
        torch.full((b,), min_p),
        seeds,
        torch.zeros(b, dtype=torch.int64),
    )


def counts(probs: list[float], **options: float) -> list[int]:
    logits = torch.tensor(probs).log().repeat(DRAWS, 1)
    found: list[int] = torch.bincount(draw(logits, **options), minlength=len(probs)).tolist()  # type: ignore[arg-type]
    return found


def critical(freedom: int) -> float:
    """The chi-square value exceeded once in 10,000 times (Wilson-Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3)


def check(found: list[int], right: list[float]) -> None:
    """The counts fit the distribution, and impossible tokens never occur."""
    total = math.fsum(right)
    assert all(n == 0 for n, p in zip(found, right, strict=True) if p == 0)
    expected = [DRAWS * p / total for p in right]
    chi = math.fsum((n - e) ** 2 / e for n, e in zip(found, expected, strict=True) if e)
    assert chi < critical(max(1, sum(p > 0 for p in right) - 1)), (found, expected)


def kept(keep: set[int], probs: list[float] = PROBS) -> list[float]:
    return [p if i in keep else 0.0 for i, p in enumerate(probs)]


def test_every_option_off_is_the_softmax() -> None:
    check(counts(PROBS), PROBS)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    check(counts(PROBS, temperature=temperature), [p ** (1 / temperature) for p in PROBS])


@pytest.mark.parametrize(
    ("top_k", "keep"), [(1, {0}), (3, {0, 2, 3}), (5, {0, 2, 3, 4, 5}), (4, {0, 2, 3, 4}), (99, set(range(8)))]
)
def test_top_k_keeps_the_k_most_likely_ties_to_the_lower_id(top_k: int, keep: set[int]) -> None:
    check(counts(PROBS, top_k=top_k), kept(keep))


@pytest.mark.parametrize(
    ("top_p", "keep"), [(0.01, {0}), (0.5, {0, 2}), (0.56, {0, 2, 3}), (0.75, {0, 2, 3, 4}), (1.0, set(range(8)))]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, keep: set[int]) -> None:
    check(counts(PROBS, top_p=top_p), kept(keep))


@pytest.mark.parametrize(("min_p", "keep"), [(0.4, {0, 2, 3}), (0.3, {0, 2, 3, 4, 5}), (0.999, {0})])
def test_min_p_drops_what_is_far_below_the_best(min_p: float, keep: set[int]) -> None:
    check(counts(PROBS, min_p=min_p), kept(keep))


def test_options_apply_one_after_another() -> None:
    """Top-k leaves (.3, .25, .15, .1); top-p .8 of their .8 is .64: .3+.25 = .55 < .64, so .15 stays; min-p .6 drops it."""
    check(counts(PROBS, top_k=4, top_p=0.8), kept({0, 2, 3}))
    check(counts(PROBS, top_k=4, top_p=0.8, min_p=0.6), kept({0, 2}))
    hot = [p**2 for p in PROBS]
    check(counts(PROBS, temperature=0.5, min_p=0.3), kept({0, 2}, hot))


def test_b58_min_p_leaves_two_tokens_with_their_frequencies() -> None:
    found = counts([0.5, 0.3, 0.15, 0.05], min_p=0.4)
    assert found[2:] == [0, 0]
    assert found[0] / DRAWS == pytest.approx(0.625, rel=0.02)
    assert found[1] / DRAWS == pytest.approx(0.375, rel=0.02)


def test_temperature_zero_takes_the_argmax_ties_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0], [-3.0, -2.0, -9.0, -2.0]])
    assert draw(logits, temperature=0.0, top_k=2, min_p=0.5).tolist() == [1, 0, 1]


def test_a_tiny_temperature_is_the_argmax_too() -> None:
    logits = generator.normal("tiny", (50, 64))
    assert torch.equal(draw(logits, temperature=1e-6), logits.argmax(-1))


def test_b74_only_possible_tokens_are_chosen() -> None:
    logits = torch.full((300, 100), -math.inf)
    logits[:, 3] = 1.0
    for temperature in (0.0, 1.0, 5.0):
        assert draw(logits, temperature=temperature).tolist() == [3] * 300
    logits[:, 90] = 1.0
    assert set(draw(logits).tolist()) == {3, 90}


def test_top_p_of_one_keeps_even_the_smallest_token() -> None:
    """In float32 what comes before the last tokens already adds up to 1; they are possible all the same.

    The noise of this seed lets token 248, of probability 9e-9, win the race.
    """
    logits = torch.tensor([[0.0] + [-18.5] * 255])
    probs, noise = logits.softmax(-1), exponential_noise(torch.tensor([4388606]), torch.tensor([0]), 256)
    before = probs.cumsum(-1) - probs
    assert before[0, 248] >= probs.sum()
    assert int((probs / noise).argmax()) == 248
    assert draw(logits, seed=4388606).tolist() == [248]
    assert draw(logits, seed=4388606, top_p=0.999).tolist() == [0]


# Seeds --------------------------------------------------------------------------------------------------------------


def one(logits: Tensor, seed: int, at: int = 0) -> tuple[Tensor, ...]:
    return (
        logits,
        torch.tensor(1.0),
        torch.tensor(0),
        torch.tensor(1.0),
        torch.tensor(0.0),
        torch.tensor(seed),
        torch.tensor(at),
    )


def batch(*rows: tuple[Tensor, ...]) -> list[int]:
    ids: list[int] = sample(*(torch.stack(column) for column in zip(*rows, strict=True))).tolist()
    return ids


def test_b57_a_row_depends_on_its_seed_and_step_alone() -> None:
    """Alone, first, last, beside a greedy neighbour, in another batch at every step."""
    logits, other = generator.normal("A", (50,)), generator.normal("B", (50,))
    greedy = (
        other,
        torch.tensor(0.0),
        torch.tensor(3),
        torch.tensor(0.5),
        torch.tensor(0.1),
        torch.tensor(9),
        torch.tensor(4),
    )
    alone = [batch(one(logits, 42, t))[0] for t in range(20)]
    assert len(set(alone)) > 5
    for t in range(20):
        assert batch(one(logits, 42, t), one(other, 1))[0] == alone[t]
        assert batch(greedy, one(other, 42, t), one(logits, 42, t))[2] == alone[t]


def test_steps_and_seeds_give_independent_draws() -> None:
    logits = torch.zeros(64)
    by_step = [batch(one(logits, 5, t))[0] for t in range(200)]
    by_seed = [batch(one(logits, s, 0))[0] for s in range(200)]
    for ids in (by_step, by_seed):
        assert len(set(ids)) > 50
    assert sum(a == b for a, b in zip(by_step, by_seed, strict=True)) < 20


def splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_noise_is_splitmix_on_a_counter() -> None:
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    seeds, steps = [0, 1, 2**62, -5], [0, 7, 3, 2**40]
    noise = exponential_noise(torch.tensor(seeds), torch.tensor(steps), 6)
    for b in range(4):
        key = splitmix((splitmix(seeds[b] & mask) + steps[b] * golden) & mask)
        for i in range(6):
            word = splitmix((key + (i + 1) * golden) & mask) >> 24
            assert noise[b, i].item() == pytest.approx(-math.log1p(-(word + 0.5) * 2.0**-40), rel=1e-6)


def test_noise_is_positive_and_finite_at_both_ends() -> None:
    """Zero noise would make 0/0 of an impossible token, which argmax then prefers to all others."""
    ends = _exponential(torch.tensor([0, 1, 2**23, 2**40 - 2**15, 2**40 - 1]))
    assert bool(((ends > 0) & ends.isfinite()).all())
    assert ends.tolist() == sorted(ends.tolist())
    assert ends[0].item() == pytest.approx(2.0**-41)


def test_noise_has_the_exponential_distribution() -> None:
    noise = exponential_noise(torch.arange(20), torch.zeros(20, dtype=torch.int64), 20_000).double().flatten()
    n = noise.numel()
    assert float(noise.mean()) == pytest.approx(1.0, abs=4 / math.sqrt(n))
    assert float(noise.var()) == pytest.approx(1.0, abs=4 * math.sqrt(8 / n))
    ordered = noise.sort().values
    distance = (1 - (-ordered).exp() - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 2.23 / math.sqrt(n)  # Kolmogorov-Smirnov, once in 10,000


def test_ties_of_the_race_are_rare_over_a_large_vocabulary() -> None:
    noise = exponential_noise(torch.arange(4), torch.zeros(4, dtype=torch.int64), 129_280)
    smallest = noise.sort(-1).values[:, :100]
    assert bool((smallest[:, 1:] > smallest[:, :-1]).all())


def test_no_rows() -> None:
    assert draw(torch.zeros(0, 10)).tolist() == []


# Penalties ----------------------------------------------------------------------------------------------------------


def test_penalties_are_the_formula() -> None:
    b, v = 3, 9
    logits = generator.normal("l", (b, v)).double() * 3
    count, seen = generator.integers("c", (b, v), 0, 4).int(), generator.integers("s", (b, v), 0, 2).bool()
    rep, pres, freq = (torch.tensor(x).double() for x in ([1.0, 1.3, 2.0], [0.0, 0.5, -1.0], [0.0, 0.25, 0.1]))
    out = penalize(logits, count, seen, rep, pres, freq)
    for i in range(b):
        for j in range(v):
            x, n = float(logits[i, j]), int(count[i, j])
            if n or seen[i, j]:
                x = x / float(rep[i]) if x > 0 else x * float(rep[i])
            x -= (float(pres[i]) if n else 0.0) + float(freq[i]) * n
            assert float(out[i, j]) == pytest.approx(x, abs=1e-14)


def test_neutral_penalties_change_no_bit() -> None:
    logits = generator.normal("l", (4, 16))
    count, seen = generator.integers("c", (4, 16), 0, 3).int(), torch.ones(4, 16, dtype=torch.bool)
    none, one_ = torch.zeros(4), torch.ones(4)
    assert torch.equal(penalize(logits, count, seen, one_, none, none), logits)
    assert torch.equal(penalize(logits, count * 0, ~seen, one_ * 5, one_ * 5, one_ * 5), logits)
