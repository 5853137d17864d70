"""Sparse attention and the indexer on the CPU (spec §2.5, §2.7): few tokens at a time, so that their rows stay in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.kernel import Claim, Range, kernel
from hal_cpu.kernels.common import DECODED, FLOATS

#: narrow heads do not pay for one product per token
_ROWS = Claim(
    dtypes={"q": FLOATS, "window": FLOATS, "entries": FLOATS, "sink": (torch.float32,)},
    axes={"H": Range(min=16), "d": Range(min=128)},
)


def _rows(window: Tensor, window_rows: Tensor, entries: Tensor, entry_rows: Tensor) -> Tensor:
    """The real rows of one token, float32 [n, d], the window's first."""
    near, far = window_rows[window_rows >= 0], entry_rows[entry_rows >= 0]
    if far.numel() == 0:
        return window.index_select(0, near).to(torch.float32)
    return torch.cat((window.index_select(0, near), entries.index_select(0, far))).to(torch.float32)


@kernel("sparse_attention", claim=_ROWS, priority=10, evidence="hardware", reproducibility="R2")
def sparse_attention(
    q: Tensor, window: Tensor, window_rows: Tensor, entries: Tensor, entry_rows: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """Two products per token over its real rows only: nothing is masked, and no token depends on another."""
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        rows = _rows(window, window_rows[t], entries, entry_rows[t])
        if rows.shape[0] == 0:
            continue
        s = (q[t].to(torch.float32) @ rows.T).mul_(scale)
        m = s.amax(-1, keepdim=True)
        p = s.sub_(m).exp_()
        total = p.sum(-1, keepdim=True).add_((sink[:, None] - m).exp_())
        out[t] = (p.to(q.dtype).to(torch.float32) @ rows).div_(total)
    return out


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Index scores [p, n] of queries q [p, H, d] over float32 keys [n, d], rounded to the carrier where the reference is."""
    dots = (q.flatten(0, 1).to(torch.float32) @ keys.T).to(q.dtype).view(*q.shape[:2], -1)
    return dots.relu_().mul_(weights[..., None]).sum(1, dtype=torch.float32).to(q.dtype)


def _chosen(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Mask [p, n] of the k best visible scores; ties go to the lower entry, NaN is never chosen, -inf before nothing is."""
    hidden = (torch.arange(scores.shape[1]) >= visible[:, None]) | scores.isnan()
    if scores.shape[1] <= k:
        return ~hidden
    ranked = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill_(hidden, -torch.inf)
    least = ranked.topk(k, sorted=False).values.amin(-1, keepdim=True)
    above, tied = ranked > least, (ranked == least) & ~hidden
    return above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


@kernel(
    "index_topk",
    claim=Claim(dtypes=dict.fromkeys(("q", "weights", "keys"), FLOATS)),
    priority=10,
    evidence="hardware",
    reproducibility="R1",
)
def index_topk(
    q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, slots: Tensor, visible: Tensor, k: int, page: int
) -> Tensor:
    """Scores of a few queries at a time stay in the cache, and a selection replaces the sort."""
    out = torch.full((q.shape[0], k), -1, dtype=torch.int32)
    for slot in sorted(set(slots.tolist())):
        mine = (slots == slot).nonzero()[:, 0]
        most = int(visible[mine].max())
        j = torch.arange(most)
        held = keys[pages[slot].long()[j // page] * page + j % page].to(torch.float32)
        for part in mine.split(max(1, DECODED // max(1, most * q.shape[1]))):
            chosen = _chosen(_scores(q[part], weights[part], held), visible[part], k)
            row, entry = chosen.nonzero(as_tuple=True)
            out[part[row], chosen.cumsum(-1)[row, entry] - 1] = entry.to(torch.int32)
    return out
