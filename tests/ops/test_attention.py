"""Paged rows, sparse attention with sinks and the indexer against loops in plain Python (spec §2.5, §2.7).

Faults B14, B17, B18, B21, B33, B72; kinds K7, K8, K9.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hal_ops import (
    fake_quant_fp4,
    fake_quant_fp8,
    generator,
    hadamard,
    index_topk,
    page_rows,
    rms_norm,
    rope,
    sparse_attention,
    write_kv,
    write_rows,
)
from hal_ops.attention import _GATHER_LIMIT
from hal_ops.rotary import frequencies

BF16, F64 = torch.bfloat16, torch.float64
NONE = torch.zeros(0, 0, dtype=torch.int32)


def attend(q: list[float], rows: list[list[float]], sink: float, scale: float) -> list[float]:
    """One head over its rows: softmax with the sink in the denominator only."""
    if not rows:
        return [0.0] * len(q)
    s = [math.fsum(a * b for a, b in zip(q, row, strict=True)) * scale for row in rows]
    p = [math.exp(v - max(s)) for v in s]
    total = math.fsum(p) + (math.exp(sink - max(s)) if sink > -math.inf else 0.0)
    return [math.fsum(w * row[i] for w, row in zip(p, rows, strict=True)) / total for i in range(len(q))]


def oracle(q: Tensor, pools: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    out = torch.zeros_like(q, dtype=F64)
    for t in range(q.shape[0]):
        rows = [pool[r].tolist() for pool, ids in pools for r in ids[t].tolist() if r >= 0]
        for h in range(q.shape[1]):
            out[t, h] = torch.tensor(attend(q[t, h].tolist(), rows, float(sink[h]), scale), dtype=F64)
    return out


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), -1)


def one_query(q: Tensor, pool: Tensor, rows: list[int], sink: float, scale: float = 1.0) -> Tensor:
    """[H, d] of one token over one pool, without compressed entries."""
    heads = torch.full((q.shape[1],), sink, dtype=q.dtype if q.dtype == F64 else torch.float32)
    return sparse_attention(q, pool, ids(rows), pool[:0], NONE.view(1, 0)[:, :0].view(1, 0), heads, scale)[0]


# Sparse attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "entries"), [(5, 4), (1, 0), (0, 6), (7, 1)])
def test_sparse_attention_is_softmax_over_the_listed_rows(width: int, entries: int) -> None:
    tokens, heads, d = 4, 3, 10
    q, window, cache = (
        generator.normal(k, s).double() for k, s in (("q", (tokens, heads, d)), ("w", (9, d)), ("c", (8, d)))
    )
    window_rows = generator.integers("wr", (tokens, width), -1, 9).int()
    entry_rows = generator.integers("er", (tokens, entries), -1, 8).int()
    sink = generator.normal("s", (heads,)).double()
    seen = sparse_attention(q, window, window_rows, cache, entry_rows, sink, d**-0.5)
    right = oracle(q, [(window, window_rows), (cache, entry_rows)], sink, d**-0.5)
    assert torch.allclose(seen, right, rtol=0, atol=1e-13)


def test_probabilities_are_rounded_to_the_carrier_and_the_denominator_is_not() -> None:
    """Spec §2.5 step 7: exp(−1) is 0.3679 in the denominator and bf16(0.3679) = 0.3672 in the sum."""
    pool = torch.tensor([[1.0, 0.0], [0.0, 64.0]])
    q = torch.tensor([[[1.0, 0.0]]])
    p = math.exp(-1)
    seen = one_query(q.to(BF16), pool.to(BF16), [0, 1], -math.inf).tolist()
    right = [1 / (1 + p), 64 * float(torch.tensor(p).to(BF16)) / (1 + p)]
    assert seen[0] == torch.tensor(right).to(BF16).tolist()
    assert seen[0][1] != torch.tensor(64 * p / (1 + p)).to(BF16).item()


def test_b14_one_key_and_no_sink_returns_the_unrotated_latent() -> None:
    freqs, at = frequencies(64, 160_000.0), torch.tensor([1000])
    latent = generator.normal("latent", (1, 1, 512)).double()
    row = rope(latent, at, freqs)[:, 0]
    q = rope(generator.normal("q", (1, 2, 512)).double(), at, freqs)
    o = one_query(q, row, [0], -math.inf, 512**-0.5)
    back = rope(o[None], at, freqs, True)
    assert torch.allclose(back, latent.expand(1, 2, 512), rtol=0, atol=1e-13)
    assert round(512**-0.5, 7) == 0.0441942


@pytest.mark.parametrize("split", [(40, 0), (16, 24), (0, 40)])
def test_b17_leading_padding_does_not_poison_what_follows(split: tuple[int, int]) -> None:
    rows = [-1] * 16 + list(range(24))
    pool, q = generator.normal("p", (24, 16)).double(), generator.normal("q", (1, 2, 16)).double()
    sink = torch.tensor([0.5, -3.0]).double()
    a, b = ids(rows[: split[0]]), ids(rows[split[0] :])
    seen = sparse_attention(q, pool, a, pool, b, sink, 0.25)
    assert torch.allclose(seen, oracle(q, [(pool, ids(rows))], sink, 0.25), rtol=0, atol=1e-14)


@pytest.mark.parametrize("sink", [0.0, 100.0, -math.inf])
@pytest.mark.parametrize("rows", [40, 1, 0])
def test_b17_a_query_without_rows_gives_zeros(rows: int, sink: float) -> None:
    q, pool = generator.normal("q", (1, 2, 16)), torch.full((3, 16), math.nan)
    assert bool((one_query(q, pool, [-1] * rows, sink) == 0).all())


@pytest.mark.parametrize("scale", [1.0, 0.0441942])
def test_b18_very_negative_scores_still_beat_a_masked_row(scale: float) -> None:
    q = torch.tensor([[[1.0, 0.0]]])
    pool = torch.tensor([[-90_000.0 / scale, 3.0], [-90_001.0 / scale, 7.0], [5.0, 1e9]])
    seen = one_query(q, pool, [0, 1, -1], -math.inf, scale)[0, 1].item()
    assert seen == pytest.approx(0.731059 * 3 + 0.268941 * 7, abs=1e-2)
    assert one_query(q.double(), pool.double(), [-1, 1, 0], -math.inf, scale)[0, 1].item() == pytest.approx(
        oracle(q.double(), [(pool.double(), ids([0, 1]))], torch.tensor([-math.inf]), scale)[0, 0, 1].item(), abs=1e-9
    )


@pytest.mark.parametrize("stale", [math.nan, math.inf])
def test_a_stale_row_behind_minus_one_never_counts(stale: float) -> None:
    """−1 reads whatever row the kernel likes; a NaN there must not become 0·NaN."""
    q, pool = generator.normal("q", (2, 2, 8)), generator.normal("p", (4, 8))
    dirty = pool.clone()
    dirty[0] = stale
    rows, sink = ids([-1, 2, 3, -1], [3, -1, 1, 2]), torch.zeros(2)
    clean = sparse_attention(q, pool, rows, pool[:0], NONE.new_zeros(2, 0), sink, 1.0)
    assert torch.equal(sparse_attention(q, dirty, rows, pool[:0], NONE.new_zeros(2, 0), sink, 1.0), clean)


def test_pools_without_rows_are_allowed_as_long_as_nothing_reads_them() -> None:
    q, pool, sink = generator.normal("q", (1, 1, 8)), generator.normal("p", (3, 8)), torch.zeros(1)
    only = sparse_attention(q, pool, ids([0, 2]), pool[:0], NONE.new_zeros(1, 0), sink, 1.0)
    assert torch.equal(sparse_attention(q, pool, ids([0, 2]), pool[:0], ids([-1, -1]), sink, 1.0), only)
    assert torch.equal(sparse_attention(q, pool[:0], ids([-1]), pool, ids([0, 2]), sink, 1.0), only)
    with pytest.raises(IndexError):
        sparse_attention(q, pool, ids([0]), pool[:0], ids([0]), sink, 1.0)


def test_the_sink_takes_its_share_and_can_take_all() -> None:
    q, pool = torch.zeros(1, 1, 2), torch.tensor([[1.0, 4.0]])
    assert one_query(q, pool, [0], 0.0).tolist() == [[0.5, 2.0]]
    assert one_query(q, pool, [0], 1e4).tolist() == [[0.0, 0.0]]
    assert one_query(q, pool, [0], -1e4).tolist() == [[1.0, 4.0]]


def test_queries_are_taken_in_parts_without_a_trace() -> None:
    """A row list too wide for one gather gives each query the result that it has alone."""
    d, heads = 512, 64
    per = _GATHER_LIMIT // (700 * (d + heads))
    tokens = per + 2
    assert 1 < per < 60
    q, pool = generator.normal("q", (tokens, heads, d)), generator.normal("p", (50, d))
    rows, sink = generator.integers("r", (tokens, 700), -1, 50).int(), torch.zeros(heads)
    whole = sparse_attention(q, pool, rows, pool[:0], NONE.new_zeros(tokens, 0), sink, d**-0.5)
    for t in (0, per - 1, per, tokens - 1):
        one = slice(t, t + 1)
        alone = sparse_attention(q[one], pool, rows[one], pool[:0], NONE.new_zeros(1, 0), sink, d**-0.5)
        assert torch.allclose(whole[one], alone, rtol=0, atol=1e-6)


# Rows and pages -----------------------------------------------------------------------------------------------------


def test_page_rows_walks_the_page_table() -> None:
    pages = torch.tensor([[7, 3, 9], [2, 0, 5]], dtype=torch.int32)
    entries = torch.tensor([[0, 3, 4, 11, -1], [5, -1, 8, 0, 1], [-1, -1, -1, -1, -1]], dtype=torch.int32)
    slots = torch.tensor([1, 0, 1])
    right = [
        [-1 if j < 0 else int(pages[s, j // 4]) * 4 + j % 4 for j in row]
        for s, row in zip([1, 0, 1], entries.tolist(), strict=True)
    ]
    seen = page_rows(entries, slots, pages, 4)
    assert seen.tolist() == right
    assert seen.dtype == torch.int32
    assert page_rows(entries[:, :0], slots, pages, 4).shape == (3, 0)


def test_k3_what_is_written_through_pages_is_read_through_pages() -> None:
    """Rows encode (slot, entry): a wrong page or a wrong place inside one shows."""
    pages = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)
    pool = torch.full((24, 2), -1.0)
    entries = torch.arange(12, dtype=torch.int32).repeat(2, 1)
    rows = page_rows(entries, torch.tensor([0, 1]), pages, 4)
    for slot in (0, 1):
        write_rows(pool, rows[slot], torch.tensor([[float(slot), float(j)] for j in range(12)]))
    assert pool.tolist() == [
        [float(p in (1, 4, 2)), (([3, 0, 5] if p in (3, 0, 5) else [1, 4, 2]).index(p)) * 4.0 + i]
        for p in range(6)
        for i in range(4)
    ]


def test_write_rows_skips_minus_one_and_touches_nothing_else() -> None:
    pool, values = torch.full((6, 3), 9.0, dtype=BF16), torch.arange(12.0).view(4, 3)
    write_rows(pool, torch.tensor([4, -1, 0, -1]), values)
    assert pool.tolist() == [[6, 7, 8], [9, 9, 9], [9, 9, 9], [9, 9, 9], [0, 1, 2], [9, 9, 9]]
    before = pool.clone()
    write_rows(pool, torch.zeros(0, dtype=torch.int32), values[:0])
    write_rows(pool, torch.tensor([-1, -1]), values[:2])
    assert torch.equal(pool, before)


@pytest.mark.parametrize("kind", ["kv", "plain", "index"])
def test_write_kv_norms_rotates_and_quantises_by_kind(kind: str) -> None:
    x, norm, freqs = (
        generator.normal("x", (3, 128)).to(BF16),
        generator.normal("n", (128,)) * 0.1 + 1,
        frequencies(64, 1e4),
    )
    at = torch.tensor([0, 5, 999])
    pool = torch.zeros(5, 128, dtype=BF16)
    write_kv(pool, torch.tensor([4, -1, 1]), x, norm, at, freqs, 1e-6, kind)
    turned = rope(rms_norm(x, norm, 1e-6)[:, None], at, freqs)[:, 0]
    if kind == "kv":
        turned = torch.cat((fake_quant_fp8(turned[:, :64], 64), turned[:, 64:]), -1)
    elif kind == "index":
        turned = fake_quant_fp4(hadamard(turned), 32)
    assert torch.equal(pool[[4, 1]], turned[[0, 2]])
    assert bool((pool[[0, 2, 3]] == 0).all())


# Indexer ------------------------------------------------------------------------------------------------------------


def best(scores: list[float], k: int) -> list[int]:
    """The k highest scores, ties to the lower number, ascending; NaN never."""
    real = [j for j, s in enumerate(scores) if not math.isnan(s)]
    return sorted(sorted(real, key=lambda j: (-scores[j], j))[:k])


def padded(chosen: list[int], k: int) -> list[int]:
    return chosen + [-1] * (k - len(chosen))


def select(scores: list[float], k: int, visible: int | None = None, dtype: torch.dtype = torch.float32) -> list[int]:
    """The operator on keys whose scores are exactly ``scores``: one head, one dim, query and weight 1."""
    n = len(scores)
    keys, pages = torch.tensor(scores, dtype=dtype)[:, None], torch.arange(n, dtype=torch.int32)[None]
    one = torch.ones(1, 1, dtype=dtype)
    seen = index_topk(
        one[..., None],
        one,
        keys,
        pages,
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([n if visible is None else visible]),
        k,
        1,
    )
    chosen: list[int] = seen[0].tolist()
    return chosen


@pytest.mark.parametrize("k", [1, 4, 11, 30])
def test_index_topk_is_the_formula_over_pages_and_slots(k: int) -> None:
    tokens, heads, d, page = 6, 4, 8, 4
    q, w = generator.normal("q", (tokens, heads, d)).double(), generator.normal("w", (tokens, heads)).double()
    keys = generator.normal("k", (2 * 6 * page, d)).double()
    pages = torch.stack((generator.permutation("pages", 12)[:6], generator.permutation("pages", 12)[6:])).int()
    slots, visible = torch.tensor([0, 1, 1, 0, 1, 0]), torch.tensor([24, 13, 0, 7, 1, 20])
    seen = index_topk(q, w, keys, pages, slots, visible, k, page)
    assert seen.dtype == torch.int32
    for t in range(tokens):
        scores = []
        for j in range(int(visible[t])):
            key = keys[int(pages[slots[t], j // page]) * page + j % page].tolist()
            dots = [math.fsum(a * b for a, b in zip(q[t, h].tolist(), key, strict=True)) for h in range(heads)]
            scores.append(math.fsum(max(0.0, v) * float(w[t, h]) for h, v in enumerate(dots)))
        assert seen[t].tolist() == padded(best(scores, k), k)


def test_scores_are_rounded_to_the_carrier_at_every_step() -> None:
    """Spec §2.7: in bf16 257 becomes 256, so that entry 0 ties with entry 1 and wins as the lower one."""
    assert select([256.0, 257.0], 1) == [1]
    q = torch.tensor([[[1.0, 1.0]]], dtype=BF16)
    keys, one = torch.tensor([[256.0, 0.0], [256.0, 1.0]], dtype=BF16), torch.ones(1, 1, dtype=BF16)
    pages, at = torch.tensor([[0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    assert index_topk(q, one, keys, pages, at, torch.tensor([2]), 1, 2).tolist() == [[0]]
    assert index_topk(q.float(), one.float(), keys.float(), pages, at, torch.tensor([2]), 1, 2).tolist() == [[1]]


def test_b21_no_query_chooses_a_row_that_is_not_complete() -> None:
    """16 tokens at ratio 4: row 3 (tokens 12-15) matches best, and only the query of token 15 may take it."""
    keys = torch.tensor([[1.0], [2.0], [3.0], [100.0]])
    t = torch.arange(16)
    visible = (t + 1) // 4
    ones, pages = torch.ones(16, 1), torch.arange(4, dtype=torch.int32)[None]

    def chosen(k: Tensor) -> Tensor:
        return index_topk(ones[..., None], ones, k, pages, torch.zeros(16, dtype=torch.int64), visible, 2, 1)

    right = [padded(best(keys[: (p + 1) // 4, 0].tolist(), 2), 2) for p in range(16)]
    assert chosen(keys).tolist() == right
    assert right[14] == [1, 2]
    assert right[15] == [2, 3]
    other = keys.clone()
    other[3] = -5.0
    assert torch.equal(chosen(other)[:15], chosen(keys)[:15])


@pytest.mark.parametrize("length", [2047, 2048, 2052, 4100])
@pytest.mark.parametrize("k", [512, 1024])
def test_b33_as_many_rows_as_the_configuration_says(k: int, length: int) -> None:
    rows = length // 4
    chosen = select(generator.uniform("scores", (rows,)).tolist(), k)
    assert len(chosen) == k
    real = [j for j in chosen if j >= 0]
    assert len(set(real)) == len(real) == min(rows, k)
    assert chosen == padded(sorted(real), k)


@pytest.mark.parametrize(("nan", "inf"), [((), ()), ((5, 17, 4000), (2500,))])
def test_b72_a_huge_tie_class_fills_up_from_the_lowest_row(nan: tuple[int, ...], inf: tuple[int, ...]) -> None:
    scores = [0.5] * 6000
    high = generator.permutation("high", 6000)[:37].tolist()
    for j, value in [(j, 2.0) for j in high] + [(j, math.nan) for j in nan] + [(j, math.inf) for j in inf]:
        scores[j] = value
    chosen = select(scores, 512)
    assert len(set(chosen)) == 512
    assert -1 not in chosen
    assert {j for j in high if scores[j] == 2.0} <= set(chosen)
    assert set(inf) <= set(chosen)
    assert not set(nan) & set(chosen)
    assert chosen == best(scores, 512)


@pytest.mark.parametrize("count", [511, 512, 513])
def test_k8_fewer_as_many_and_more_rows_than_k(count: int) -> None:
    scores = generator.uniform("s", (count,)).tolist()
    assert select(scores, 512) == padded(best(scores, 512), 512)


def test_b03_a_row_without_a_score_is_never_chosen_and_a_needle_always() -> None:
    scores = generator.uniform("s", (1200,)).tolist()
    scores[700], scores[3] = 9.0, math.nan
    assert 700 in select(scores, 512)
    assert 3 not in select(scores, 1200)
    assert select([math.nan] * 4, 2) == [-1, -1]


def test_minus_infinity_is_a_score_and_comes_before_a_row_without_one() -> None:
    """A weight of −1 turns the largest product into the lowest score."""
    keys, pages = torch.tensor([[math.nan], [math.inf], [math.inf]]), torch.tensor([[0]], dtype=torch.int32)
    at, minus = torch.zeros(1, dtype=torch.int64), -torch.ones(1, 1)
    assert index_topk(torch.ones(1, 1, 1), minus, keys, pages, at, torch.tensor([3]), 2, 3).tolist() == [[1, 2]]


def test_k7_other_sequences_never_matter() -> None:
    keys, pages = generator.normal("k", (16, 4)), torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    q, w, slots = generator.normal("q", (4, 2, 4)), generator.normal("w", (4, 2)), torch.tensor([0, 1, 0, 1])
    visible = torch.tensor([8, 8, 5, 3])
    seen = index_topk(q, w, keys, pages, slots, visible, 3, 4)
    dirty = keys.clone()
    dirty[4:8], dirty[12:] = math.nan, 1e9
    assert torch.equal(index_topk(q, w, dirty, pages, slots, visible, 3, 4)[[0, 2]], seen[[0, 2]])


def test_k9_no_queries_and_nothing_visible() -> None:
    assert select([1.0, 2.0], 3, visible=0) == [-1, -1, -1]
    none = index_topk(
        torch.zeros(0, 2, 4),
        torch.zeros(0, 2),
        torch.zeros(8, 4),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        5,
        8,
    )
    assert none.shape == (0, 5)
