"""Choosing tokens on the CPU (spec §6.5): greedy rows take the argmax; only the others are sorted."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.kernel import Claim, kernel
from hal_ops.sampling import exponential_noise


@kernel(
    "sample", claim=Claim(dtypes={"logits": (torch.float32,)}), priority=10, evidence="hardware", reproducibility="R2"
)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """Without a row of positive temperature this is one argmax."""
    warm = (temperature > 0).nonzero()[:, 0]
    if 0 < warm.shape[0] == logits.shape[0]:
        return _drawn(logits, temperature, top_k, top_p, min_p, seeds, steps)
    ids = logits.argmax(-1)
    if warm.shape[0]:
        ids[warm] = _drawn(*(t[warm] for t in (logits, temperature, top_k, top_p, min_p, seeds, steps)))
    return ids


def _drawn(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """Rows of positive temperature: top-k, top-p on what is left, min-p, then the exponential race among the kept."""
    ordered, index = (
        logits.div(temperature.clamp(min=1e-5)[:, None]).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    rank = torch.arange(ordered.shape[1])
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    mass = ordered * keep
    keep &= (mass.cumsum(-1) - mass) < top_p[:, None] * mass.sum(-1, keepdim=True)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    noise = exponential_noise(seeds, steps, ordered.shape[1]).gather(1, index)
    race = torch.where(keep, ordered / noise, -1.0)
    return index.gather(1, race.argmax(-1, keepdim=True))[:, 0]
