"""Collectives over real processes: two ranks on Gloo (spec §4.4; kind K13: the same bits on every rank)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from hal_ops import all_gather, all_reduce, generator

WORLD = 2
CASES = [(0, 8, "bfloat16"), (1, 8, "bfloat16"), (5, 33, "bfloat16"), (4, 7, "float32"), (3, 3, "float64")]


Case = tuple[int, int, str]
Results = list[dict[Case, dict[str, Tensor]]]


def part(rank: int, tokens: int, dim: int, dtype: str) -> Tensor:
    """What ``rank`` holds."""
    return generator.normal(f"rank{rank}/{tokens}", (tokens, dim)).to(getattr(torch, dtype))


def views(x: Tensor) -> dict[str, Tensor]:
    """The same values dense, as a slice of a wider buffer, and with transposed strides."""
    wide = x.repeat_interleave(2, 1)
    return {"dense": x, "slice": wide[:, ::2], "transpose": x.T.contiguous().T}


def work(rank: int, folder: str) -> None:
    """One rank: run every case and leave the results in a file."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    results = {}
    for case in CASES:
        x = part(rank, *case)
        found = {f"sum/{n}": all_reduce(v, WORLD) for n, v in views(x).items()}
        found |= {f"join/{n}": all_gather(v, WORLD) for n, v in views(x).items()}
        results[case] = found | {"argument": x}
    distributed.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(work, (str(folder),), WORLD)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"rank{r}.pt") for r in range(WORLD)]


@pytest.mark.parametrize("view", ["dense", "slice", "transpose"])
@pytest.mark.parametrize("case", CASES)
def test_all_reduce_sums_in_float32_and_rounds_once(ranks: Results, case: Case, view: str) -> None:
    tokens, dim, dtype = case
    wide = torch.float64 if dtype == "float64" else torch.float32
    right = torch.zeros(tokens, dim, dtype=wide)
    for t in range(tokens):
        for i in range(dim):
            right[t, i] = sum(part(r, *case)[t, i].to(wide) for r in range(WORLD))
    for rank in ranks:
        assert rank[case][f"sum/{view}"].dtype == getattr(torch, dtype)
        assert torch.equal(rank[case][f"sum/{view}"], right.to(getattr(torch, dtype)))


@pytest.mark.parametrize("view", ["dense", "slice", "transpose"])
@pytest.mark.parametrize("case", CASES)
def test_all_gather_joins_columns_in_rank_order(ranks: Results, case: Case, view: str) -> None:
    tokens, dim, _ = case
    parts = [part(r, *case).tolist() for r in range(WORLD)]
    for rank in ranks:
        assert rank[case][f"join/{view}"].shape == (tokens, WORLD * dim)
        assert rank[case][f"join/{view}"].tolist() == [[*a, *b] for a, b in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_the_argument_keeps_its_values(ranks: Results, case: Case) -> None:
    """Also where no cast makes a copy: a float32 carrier is summed in float32."""
    for r, rank in enumerate(ranks):
        assert torch.equal(rank[case]["argument"], part(r, *case))


def test_one_rank_gets_its_own_values_in_new_memory() -> None:
    x = part(0, 3, 5, "bfloat16")
    for op in (all_reduce, all_gather):
        y = op(x, 1)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()
