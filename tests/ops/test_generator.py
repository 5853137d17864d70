"""The sample generator: the same bytes on every machine, and values spread as each family says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from hal.errors import InputError
from hal_ops import generator

FAMILIES = ("normal", "positive", "outliers", "rows", "adversarial")
MASK = (1 << 64) - 1


def splitmix64(key: str, index: int) -> int:
    """Word ``index`` of ``key``, in Python's own integers."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def digest(values: torch.Tensor | np.ndarray) -> str:
    array = values.numpy() if isinstance(values, torch.Tensor) else values
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()[:16]


def test_bits_are_the_upper_halves_of_the_words() -> None:
    got = generator.bits("some key", 5)
    assert got.dtype == np.uint32
    assert got.tolist() == [splitmix64("some key", i) >> 32 for i in range(5)]


def test_a_longer_draw_begins_with_the_shorter_one_across_chunks() -> None:
    long = generator.bits("chunks", 100_000)
    assert np.array_equal(long[:70_000], generator.bits("chunks", 70_000))
    assert int(long[99_999]) == splitmix64("chunks", 99_999) >> 32
    assert torch.equal(generator.normal("chunks", (20_000,))[:9_000], generator.normal("chunks", (9_000,)))


def test_normal_is_a_sum_of_sixteen_16_bit_integers() -> None:
    words = [splitmix64("sum", i) for i in range(8)]
    sums = [sum((w >> s) & 0xFFFF for w in words[4 * i : 4 * i + 4] for s in (0, 16, 32, 48)) for i in range(2)]
    right = [float(np.float32((t - 8 * 65535) * 2.0**-16) * np.float32(0.8660254)) for t in sums]
    assert generator.normal("sum", (2,)).tolist() == right


FROZEN: dict[str, Callable[[], torch.Tensor | np.ndarray]] = {
    "bits": lambda: generator.bits("frozen", 1000),
    "uniform": lambda: generator.uniform("frozen", (10, 100), -3.0, 5.0),
    "integers": lambda: generator.integers("frozen", (1000,), -7, 1000),
    "permutation": lambda: generator.permutation("frozen", 1000),
    **{family: partial(generator.draw, family, "frozen", (40, 64)) for family in FAMILIES},
}
DIGESTS = {
    "bits": "c20cb768d902817d",
    "uniform": "e78488be129ebcfa",
    "integers": "9438ca1e4a55894b",
    "permutation": "fa9fd05a0b139c7d",
    "normal": "fd535103e1af0dfe",
    "positive": "caf63bf72eeedd04",
    "outliers": "70138bc2176c2dc3",
    "rows": "53ed5995f9007bd9",
    "adversarial": "74bedc104e1b739d",
}


@pytest.mark.parametrize("name", FROZEN)
def test_the_bytes_are_frozen(name: str) -> None:
    assert digest(FROZEN[name]()) == DIGESTS[name]


def test_keys_are_independent_and_repeat() -> None:
    a, b = generator.normal("a", (10_000,)), generator.normal("b", (10_000,))
    assert torch.equal(a, generator.normal("a", (10_000,)))
    # the correlation of independent samples has deviation 1/sqrt(n): six of them
    assert abs(float((a * b).mean())) < 6 / math.sqrt(10_000)


def test_normal_has_mean_zero_variance_one_and_both_tails() -> None:
    n = 200_000
    x = generator.normal("moments", (n,)).double()
    assert abs(float(x.mean())) < 6 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 6 * math.sqrt(2 / n)
    assert float(x.min()) < -3.5
    assert float(x.max()) > 3.5
    assert float(x.abs().max()) < 7


def test_uniform_fills_its_interval() -> None:
    x = generator.uniform("interval", (100_000,), -2.0, 6.0)
    assert x.dtype == torch.float32
    assert -2.0 <= float(x.min()) < -1.99
    assert 5.99 < float(x.max()) <= 6.0
    assert abs(float(x.double().mean()) - 2.0) < 6 * 8 / math.sqrt(12 * 100_000)


def test_integers_cover_their_range_and_refuse_an_empty_one() -> None:
    x = generator.integers("range", (10_000,), -3, 4)
    assert x.dtype == torch.int64
    assert sorted(set(x.tolist())) == list(range(-3, 4))
    with pytest.raises(InputError, match="low = 5 to high = 5"):
        generator.integers("range", (1,), 5, 5)
    assert generator.integers("range", (0,), 0, 0).shape == (0,)


def test_a_permutation_holds_every_index_once() -> None:
    order = generator.permutation("order", 513)
    assert torch.equal(order.sort().values, torch.arange(513))
    assert not torch.equal(order, torch.arange(513))


def test_positive_has_no_negative_value() -> None:
    assert float(generator.draw("positive", "p", (64, 64)).min()) >= 0


def test_outliers_scales_eight_channels_by_fifty() -> None:
    ratio = generator.draw("outliers", "o", (16, 512)) / generator.normal("o", (16, 512))
    large = (ratio > 40).all(0)
    assert int(large.sum()) == 8
    assert torch.equal(ratio[:, ~large], torch.ones(16, 504))


def test_rows_are_scaled_by_powers_of_two_in_turn() -> None:
    ratio = generator.draw("rows", "r", (2, 24, 8)) / generator.normal("r", (2, 24, 8))
    right = torch.tensor([2.0**k for k in range(-20, 4)])[None, :, None].expand(2, 24, 8)
    assert torch.equal(ratio, right)


def test_adversarial_holds_the_values_that_break_kernels() -> None:
    x = generator.draw("adversarial", "adv", (256, 256))
    values = set(x.flatten().tolist())
    assert {448.0, -448.0, 448.0 * 256, 448.0 * 2.0**-16, 2.0**-149, 2.0**-127, 1.0, 2.0**-12} <= values
    assert bool(((x == 0) & x.signbit()).any())
    zero_rows = int((x == 0).all(1).sum())
    assert 5 <= zero_rows <= 60


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (5,), (2, 3, 4)])
def test_every_family_draws_every_shape(family: str, shape: tuple[int, ...]) -> None:
    x = generator.draw(family, "shape", shape)
    assert (x.shape, x.dtype) == (shape, torch.float32)
    assert x.isfinite().all()


def test_an_unknown_family_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="'gaussian' is unknown, right is one of normal, positive"):
        generator.draw("gaussian", "k", (2, 2))
