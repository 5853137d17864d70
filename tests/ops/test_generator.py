"""The sample generator draws the same bytes on every machine, for ever: the digests below freeze them.

A change of any digest changes the inputs that every earlier report was judged on; it needs a new operator version.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

from hal.errors import InputError
from hal_ops import generator

DRAWS = {
    ("normal", (7,)): "7b4fb18f8f12eaafdc2008cc268b402f",
    ("normal", (3, 5)): "5c157e9e2b4c5feef75490e251b08de5",
    ("normal", (2, 3, 24)): "4bb5f537fd5e085568e5c2742732ba07",
    ("normal", (100, 40)): "309d8a03394874209af39f8fa1600664",
    ("positive", (7,)): "ab092447c74665ae7f353a64ec89b2e9",
    ("positive", (3, 5)): "765e6b5898019edee0a130b200a04812",
    ("positive", (2, 3, 24)): "896543b826b32c5e2b67ec2eb34ab0cb",
    ("positive", (100, 40)): "92e166b119d5f18639ecbe81a4a5babc",
    ("outliers", (7,)): "4bd77cfc6d58f3f7391865134e4348f3",
    ("outliers", (3, 5)): "29b192bdd53ce439faa1b15db760cdf3",
    ("outliers", (2, 3, 24)): "8eefff0a85e910fac09ec40eeb88a843",
    ("outliers", (100, 40)): "fa7a91508f9b8934219cc211563d9f5d",
    ("rows", (7,)): "08a1a06752dc507d1502b4f57deb5db4",
    ("rows", (3, 5)): "52038fc119b51d7e5fb525e9780164a5",
    ("rows", (2, 3, 24)): "19e831e4ca6435cc34e5404a61d3ecb5",
    ("rows", (100, 40)): "9fe72b70a65af95565ee4979965ba9fc",
    ("adversarial", (7,)): "3addfb141cd7c9c4c6543a82191a3707",
    ("adversarial", (3, 5)): "0f9b154d2a1a8d3bddc9f8d6b123546b",
    ("adversarial", (2, 3, 24)): "38e98e6ff68336084e4b8fbffc47c122",
    ("adversarial", (100, 40)): "e0e1252b959467a56ab8c4d3bffe3e61",
}
FAMILIES = ["normal", "positive", "outliers", "rows", "adversarial"]


def sha(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def word(key: str, i: int) -> int:
    """Word i of a key, from SplitMix64's definition."""
    mask = (1 << 64) - 1
    x = (int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") + (i + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


# Frozen bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "shape"), DRAWS)
def test_the_bytes_of_every_family_are_frozen(family: str, shape: tuple[int, ...]) -> None:
    x = generator.draw(family, "frozen", shape)
    assert (tuple(x.shape), x.dtype) == (shape, torch.float32)
    assert sha(x) == DRAWS[family, shape]


def test_the_bytes_of_every_function_are_frozen() -> None:
    assert sha(generator.uniform("frozen", (1000,))) == "afcd96d090360007aa5222a42bb648f6"
    assert sha(generator.uniform("frozen", (1000,), -3.0, 5.0)) == "e78488be129ebcfa7f3c631354ecba68"
    assert sha(generator.integers("frozen", (1000,), -5, 1000)) == "c4f302edba707eba2ebbb8a02ccf79db"
    assert sha(generator.permutation("frozen", 1000)) == "fa9fd05a0b139c7ddeed3a7c5b443ae0"
    words = generator.bits("frozen", 70_000).astype("<u4").tobytes()
    assert hashlib.sha256(words).hexdigest()[:32] == "feb20126f1f700267c030ed57180cda9"


@pytest.mark.parametrize("i", [0, 1, 32_767, 32_768, 65_535, 65_536, 70_000])
def test_words_are_splitmix_of_a_counter_across_chunks(i: int) -> None:
    assert int(generator.bits("key", i + 1)[i]) == word("key", i) >> 32


@pytest.mark.parametrize("i", [0, 5, 8191, 8192, 20_000])
def test_a_normal_value_is_the_scaled_sum_of_sixteen_fields(i: int) -> None:
    fields = [(word("key", 4 * i + w) >> s) & 0xFFFF for w in range(4) for s in (0, 16, 32, 48)]
    right = torch.tensor((sum(fields) - 8 * 65535) / 65536) * torch.tensor(0.8660254)
    assert generator.normal("key", (i + 1,))[i] == right


def test_uniform_and_integers_come_from_the_same_words() -> None:
    assert generator.uniform("key", (3,)).tolist() == [(word("key", i) >> 40) / 2**24 for i in range(3)]
    assert generator.integers("key", (3,), -4, 13).tolist() == [word("key", i) % 17 - 4 for i in range(3)]


# Independence -------------------------------------------------------------------------------------------------------


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert torch.equal(generator.normal("k", (50_000,))[:9000], generator.normal("k", (9000,)))
    assert torch.equal(generator.uniform("k", (50_000,))[:9000], generator.uniform("k", (9000,)))


def test_keys_are_independent() -> None:
    a, b = generator.normal("k1", (50_000,)).double(), generator.normal("k2", (50_000,)).double()
    assert abs(float((a * b).mean())) < 4 / math.sqrt(50_000)
    assert abs(float((a[1:] * a[:-1]).mean())) < 4 / math.sqrt(50_000)


# Distributions ------------------------------------------------------------------------------------------------------


def test_normal_has_mean_0_variance_1_and_little_beyond_4() -> None:
    n = 200_000
    x = generator.normal("moments", (n,)).double()
    assert abs(float(x.mean())) < 4 / math.sqrt(n)
    assert float(x.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / n))
    assert abs(float((x**3).mean())) < 4 * math.sqrt(15 / n)
    assert float((x**4).mean()) == pytest.approx(3 - 1.2 / 16, abs=4 * math.sqrt(96 / n))  # Irwin-Hall of 16
    assert float(x.abs().max()) < 7
    assert 0 < float((x.abs() > 3).double().mean()) < 0.0027


def test_uniform_covers_its_range() -> None:
    n = 100_000
    x = generator.uniform("range", (n,), -3.0, 5.0).double()
    assert float(x.min()) >= -3
    assert float(x.max()) <= 5
    assert float(x.mean()) == pytest.approx(1, abs=4 * 8 / math.sqrt(12 * n))
    ordered = x.sort().values
    distance = ((ordered + 3) / 8 - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 2.23 / math.sqrt(n)  # Kolmogorov-Smirnov, once in 10,000


def test_integers_reach_both_ends_and_all_between() -> None:
    x = generator.integers("ends", (70_000,), -3, 4)
    counts = torch.bincount(x + 3, minlength=7)
    assert counts.shape == (7,)
    assert float(((counts - 10_000.0) ** 2 / 10_000).sum()) < 27.9  # chi-square of 6, once in 10,000
    assert generator.integers("one", (5,), 9, 10).tolist() == [9] * 5
    assert generator.integers("none", (0,), 0, 0).shape == (0,)
    with pytest.raises(InputError, match="from low = 4 to high = 4, right is high > low"):
        generator.integers("empty", (1,), 4, 4)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_a_permutation_is_one(count: int) -> None:
    p = generator.permutation("p", count)
    assert p.dtype == torch.int64
    assert sorted(p.tolist()) == list(range(count))
    assert count < 1000 or float((p == torch.arange(count)).double().mean()) < 0.01


# Families -----------------------------------------------------------------------------------------------------------


def test_what_each_family_is_for() -> None:
    x = generator.draw("normal", "f", (48, 64))
    assert torch.equal(generator.draw("positive", "f", (48, 64)), x.abs())
    factor = generator.draw("outliers", "f", (48, 64)) / x
    assert sorted(factor[0].round().tolist()) == [1] * 56 + [50] * 8
    assert bool((factor.round() == factor[0].round()).all())
    steps = (generator.draw("rows", "f", (48, 64)) / x).log2()
    assert steps.tolist() == [[t % 24 - 20] * 64 for t in range(48)]


def test_adversarial_values_hold_what_breaks_formats() -> None:
    x = generator.draw("adversarial", "f", (400, 64))
    present = set(x.flatten().tolist())
    assert {448.0, -448.0, 449.0, 447.0, 896.0, 6.0, 3.5, 1e4, 2.0**-149} <= present
    assert bool(((x == 0) & x.signbit()).any())
    assert 20 <= int((x == 0).all(-1).sum()) <= 70
    assert bool(x.isfinite().all())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (1,), (2, 0, 4)])
def test_empty_and_single_shapes(family: str, shape: tuple[int, ...]) -> None:
    assert tuple(generator.draw(family, "k", shape).shape) == shape


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="'wild' is unknown, right is one of normal, positive, outliers, rows, adversarial"
    ):
        generator.draw("wild", "k", (2,))
