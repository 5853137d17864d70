"""Samples: tensors drawn by name, grids of axes and families, and the digest that proves equal inputs.

The frozen values are part of every report: a change means that earlier reports were judged on other inputs.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from hal_ops import generator
from hal_ops.samples import Draw, digest, grid, token_grid
from hal_ops.weight import Weight

FAMILIES = ["normal", "positive", "outliers", "rows", "adversarial"]


def sha(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def test_the_bytes_of_sample_tensors_are_frozen() -> None:
    draw = Draw("k", "outliers")
    assert sha(draw.act("x", 4, 8)) == "665648f8dc8019a5dbdab9fafaeb9882"
    assert sha(draw.f32("x", 4, 8, scale=0.5, center=1.0)) == "427d928d52f5fab4248bc6604a82f37c"
    assert sha(draw.weight("w", 4, 8)) == "151a82673825951b17c5fa6fd743a05e"
    assert sha(draw.ints("i", 9, low=-1, high=5)) == "a4f5a575d0c4d581a26f5ba5209f8435"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_drawing_does_not_matter(family: str) -> None:
    first, second = Draw("k", family), Draw("k", family)
    a, b = first.act("a", 5, 16), first.act("b", 5, 16)
    torch.manual_seed(123)
    assert torch.equal(second.act("b", 5, 16), b)
    assert torch.equal(second.act("a", 5, 16), a)
    assert not torch.equal(a, b)


def test_global_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    x = generator.draw("outliers", "k", (4, 4))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(generator.draw("outliers", "k", (4, 4)), x)


def _toy(draw: Draw, T: int, D: int) -> tuple[Tensor, ...]:
    return (draw.act("x", T, D),)


def test_a_grid_yields_every_set_of_axes_in_every_family() -> None:
    samples = list(grid(_toy, [{"T": 2, "D": 4}, {"T": 3, "D": 4, "full": True}], families=("normal", "rows"))())
    assert [s.id for s in samples] == ["T2,D4/normal", "T2,D4/rows", "T3,D4/normal", "T3,D4/rows"]
    assert [s.full for s in samples] == [False, False, True, True]
    assert [tuple(s.make()[0].shape) for s in samples] == [(2, 4), (2, 4), (3, 4), (3, 4)]
    assert len({digest(s.make()) for s in samples}) == 4


def test_a_token_grid_has_both_models_odd_sizes_and_no_tokens() -> None:
    sets = token_grid("D", odd={"D": 96}, prefill=100)
    assert {s["D"] for s in sets} == {4096, 7168, 96}
    assert [s["T"] for s in sets if s["D"] == 96] == [0, 1, 5]
    assert all(s["T"] == 1 for s in sets if s["D"] > 96 and "full" not in s)
    assert {s["T"] for s in sets if s.get("full")} == {8, 64, 100}


def test_a_digest_covers_every_tensor_and_the_fields_of_weights() -> None:
    x, w = torch.arange(6.0).view(2, 3), Weight(torch.zeros(2, 2), torch.ones(2))
    base = digest((x, w, 3))
    assert digest((x.T.contiguous().T, w, 3)) == base
    assert digest((x + 1, w, 3)) != base
    assert digest((x, Weight(torch.zeros(2, 2), torch.zeros(2)), 3)) != base
    assert digest((x, Weight(torch.ones(2, 2), torch.ones(2)), 3)) != base
    assert digest((x[:0], None)) == digest(()) == 0
