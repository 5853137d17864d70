"""Mixing of the residual streams on the CPU (spec §2.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hal.kernel import Claim, kernel
from hal_cpu.kernels.common import FLOATS, PIECE, pieces


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """``(v·fnᵀ)·rsqrt(mean(v²) + eps)``, float32 [T, M], with v the flattened streams."""
    flat = streams.flatten(1)
    out = torch.empty(flat.shape[0], fn.shape[0])
    for part in pieces(flat.shape[0], flat.shape[1], 4 * PIECE):
        v = flat[part].to(torch.float32)
        out[part] = (v @ fn.T).mul_(torch.linalg.vecdot(v, v).div_(v.shape[1]).add_(norm_eps).rsqrt_()[:, None])
    return out


def _sinkhorn(comb: npt.NDArray[np.float32], eps: float, iterations: int) -> None:
    """Normalise comb float32 [m, n, T] in place: columns, then (rows, columns) ``iterations - 1`` times.

    Tokens are the last axis, so that every step is a vector operation over them.
    """
    small, add, columns = np.float32(eps), np.add.reduce, np.empty(comb.shape[1:], dtype=np.float32)
    comb /= add(comb, 0, out=columns) + small
    for _ in range(iterations - 1):
        comb /= add(comb, 1, keepdims=True) + small
        comb /= add(comb, 0, out=columns) + small


@kernel(
    "hc_mix",
    claim=Claim(dtypes={"streams": FLOATS, **dict.fromkeys(("fn", "scale", "base"), (torch.float32,))}),
    priority=10,
    evidence="hardware",
    reproducibility="R1",
)
def hc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's steps; the 4x4 matrices are normalised by NumPy, whose calls cost a fraction of PyTorch's."""
    tokens, count = streams.shape[:2]
    mixes = _mixes(streams, fn, norm_eps)
    factor = scale.repeat_interleave(torch.tensor((count, count, count * count)))
    logits = torch.addcmul(base, mixes, factor)
    sigmoids = logits[:, : 2 * count].sigmoid()
    comb = logits[:, 2 * count :].view(tokens, count, count).softmax(-1).add_(eps)
    tokens_last = np.ascontiguousarray(comb.numpy().transpose(1, 2, 0))
    _sinkhorn(tokens_last, eps, iterations)
    done = torch.from_numpy(np.ascontiguousarray(tokens_last.transpose(2, 0, 1)))
    return sigmoids[:, :count] + eps, 2 * sigmoids[:, count:], done
