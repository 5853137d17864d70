"""Generation: chunked prefill, then decode of all running sequences together, with sampling and stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hal.arena import use_workspace
from hal.errors import InputError, UsageError
from hal_model import state as states
from hal_model.model import choose, forward
from hal_model.session import Session
from hal_model.settings import Sampling
from hal_model.tokenizer import StreamDecoder
from hal_ops.moe import check_token_ids

Finish = Literal["stop", "length"]
Prefilled = Callable[[int, int], None]


@dataclass(frozen=True)
class Piece:
    """One step of one sequence: its token, the text that became certain, and why it ended, if it did."""

    index: int
    token: int
    text: str
    finish: Finish | None


@dataclass
class StopFilter:
    """Holds back text that may be the start of a stop text; what cannot be is passed on at once (fault B54)."""

    stops: tuple[str, ...]
    held: str = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Certain text, and whether a stop text was met (nothing of it is passed on)."""
        self.held += text
        found = [(at + len(s), at) for s in self.stops if (at := self.held.find(s)) >= 0]
        if found:  # the one that ends first, whatever came in one piece
            shown, self.held = self.held[: min(found)[1]], ""
            return shown, True
        keep = max((self._overlap(s) for s in self.stops), default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown, False

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        return next((n for n in range(min(len(stop), len(self.held)), 0, -1) if self.held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """The rest, when generation ends otherwise."""
        shown, self.held = self.held, ""
        return shown


@dataclass
class _Running:
    """A sequence in generation."""

    index: int
    seq: states.Sequence
    prompt: Sequence[int]
    params: Sampling
    decoder: StreamDecoder
    stops: StopFilter
    out: list[int] = field(default_factory=list)

    def take(self, token: int, eos: int) -> Piece:
        """Record a sampled token and tell what became visible."""
        self.out.append(token)
        if token == eos and not self.params.ignore_eos:
            return Piece(self.index, token, self._rest(), "stop")
        # the end token is never shown, even where generation goes on past it (fault B50)
        text, stopped = self.stops.push("" if token == eos else self.decoder.push(token))
        if stopped:
            return Piece(self.index, token, text, "stop")
        if len(self.out) == self.params.max_tokens:
            return Piece(self.index, token, text + self._rest(), "length")
        return Piece(self.index, token, text, None)

    def _rest(self) -> str:
        text, stopped = self.stops.push(self.decoder.finish())
        return text if stopped else text + self.stops.finish()


def check_prompt(session: Session, ids: Sequence[int], params: Sampling) -> None:
    """Refuse a prompt that cannot run, before any work.

    Raises:
        UsageError: empty, or prompt and new tokens together exceed ``max_seq_len``; both numbers are named (fault B56).
        InputError: an id outside the vocabulary.
    """
    limit = session.settings.max_seq_len
    if not ids:
        raise UsageError("prompt has no tokens, right is at least one")
    if len(ids) + params.max_tokens > limit:
        wanted = f"prompt of {len(ids)} tokens + max_tokens {params.max_tokens} = {len(ids) + params.max_tokens}"
        raise UsageError(
            f"{wanted} exceed max_seq_len {limit}; shorten the prompt, or lower --max-tokens, or raise --max-seq-len"
        )
    check_token_ids(torch.tensor(ids), session.config.vocab_size)


def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    params: Sampling,
    on_prefill: Prefilled | None = None,
) -> Iterator[Piece]:
    """Generate for every prompt; pieces of different sequences interleave, each sequence's in order.

    Args:
        prompts: token ids; at most ``max_batch_size`` run at a time, the others follow as slots become free.
        params: sampling; sequence i uses seed ``params.seed + i``.
        on_prefill: called with prompt tokens done and in all, for progress.

    Raises:
        UsageError, InputError: a prompt cannot run; nothing was generated. InputError during generation: logits are not finite.
    """
    for ids in prompts:
        check_prompt(session, ids, params)
    return _run(session, prompts, params, on_prefill)


def _run(
    session: Session, prompts: Sequence[Sequence[int]], params: Sampling, on_prefill: Prefilled | None
) -> Iterator[Piece]:
    waiting, running = list(enumerate(prompts)), list[_Running]()
    total, done = sum(map(len, prompts)), 0
    try:
        while waiting or running:
            if waiting and len(running) < session.settings.max_batch_size:
                one = _start(session, *waiting.pop(0), params)
                running.append(one)
                for tokens, after_chunk in _prefill(session, one):
                    done, scores = done + tokens, after_chunk
                    if on_prefill:
                        on_prefill(done, total)
                batch = [one]
            else:
                batch = list(running)
                scores = _step(session, "decode", [(r.seq, r.out[-1:]) for r in batch])
            for r, token in zip(batch, _choose(session, scores, batch), strict=True):
                piece = r.take(token, session.config.eos_token_id)
                if piece.finish:
                    session.state.close(r.seq)
                    running.remove(r)
                yield piece
    finally:
        for r in running:
            session.state.close(r.seq)


def _start(session: Session, index: int, ids: Sequence[int], params: Sampling) -> _Running:
    decoder = StreamDecoder(session.tokenizer)
    return _Running(index, session.state.open(), ids, params, decoder, StopFilter(params.stop))


def _prefill(session: Session, one: _Running) -> Iterator[tuple[int, Tensor]]:
    """Process a prompt in chunks; yields tokens done and the chunk's logits, of which only the last count."""
    chunk = session.settings.max_step_tokens
    for start in range(0, len(one.prompt), chunk):
        ids = one.prompt[start : start + chunk]
        yield len(ids), _step(session, "prefill", [(one.seq, ids)])


def _step(session: Session, phase: str, batch: Sequence[tuple[states.Sequence, Sequence[int]]]) -> Tensor:
    """One step under the plan: logits float32 [B, V]."""
    step = session.state.prepare(batch)
    bucket = session.plan.bucket(phase, sum(len(ids) for _, ids in batch))
    session.workspace.begin_step()
    with session.plan.active(bucket), use_workspace(session.workspace), torch.inference_mode():
        scores = forward(session.model, session.state.caches, step)
    session.state.commit(batch)
    return scores


def _choose(session: Session, scores: Tensor, batch: Sequence[_Running]) -> list[int]:
    """Sample one token per sequence."""
    broken = torch.nonzero(~scores.isfinite().all(-1))[:, 0].tolist()
    if broken:
        raise InputError(
            f"logits of sequence {batch[broken[0]].index} hold NaN or infinity; check the weights (--check-values)"
        )
    on, p = scores.device, batch[0].params
    rows = len(batch)
    shape = torch.tensor([[p.temperature] * rows, [p.top_p] * rows, [p.min_p] * rows], dtype=torch.float32)
    integers = torch.tensor([[p.top_k] * rows, [p.seed + r.index for r in batch], [len(r.out) for r in batch]])
    bucket = session.plan.bucket("decode", rows)
    with session.plan.active(bucket), torch.inference_mode():
        ids = choose(scores, _penalties(batch, scores) if p.penalised else None, shape.to(on), integers.to(on))
    return [int(i) for i in ids.tolist()]


def _penalties(batch: Sequence[_Running], scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts int32 [B, V], seen bool [B, V] and penalties float32 [3, B]."""
    rows, vocab = scores.shape
    counts = torch.zeros(rows, vocab, dtype=torch.int32)
    seen = torch.zeros(rows, vocab, dtype=torch.bool)
    for i, r in enumerate(batch):
        counts[i] = torch.bincount(torch.tensor(r.out, dtype=torch.int64), minlength=vocab).to(torch.int32)
        seen[i, torch.tensor(r.prompt)] = True
    p = batch[0].params
    values = [[v] * rows for v in (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)]
    on = scores.device
    return counts.to(on), seen.to(on), torch.tensor(values, dtype=torch.float32, device=on)
