"""The state of running sequences: pages of rows in the state arena, and the inputs of each step (spec §5.3).

Window rows, ratio-4 entries (with their index rows) and ratio-128 entries live in pools of pages; one page table per kind
serves all layers of that kind. Compressor rings belong to a sequence's slot. Rows are read only where positions say that
they were written, so nothing needs wiping when a slot or page changes hands.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hal.arena import Pool, StateArena, pool_bytes
from hal.device import DeviceServices
from hal.errors import ContractError, MemoryLimitError, UsageError
from hal_model.config import ModelConfig
from hal_model.layers import Cache, Entries, Step

WINDOW_PAGE = 64
PAGE = {4: 64, 128: 8}
KIND = {0: "sliding", 4: "csa", 128: "hca"}
POOL = {0: "window", 4: "csa", 128: "hca"}
CLOSED = -1  # slot of a closed sequence


@dataclass(frozen=True)
class Limits:
    """How much runs at once: sequences, tokens of one sequence, tokens of one step."""

    max_batch_size: int
    max_seq_len: int
    max_step_tokens: int

    def window_pages(self, window: int) -> int:
        """Window pages that the limits can ask for at once, the null page included."""
        per_sequence = -(-(window - 1) // WINDOW_PAGE) + 2
        return self.max_batch_size * per_sequence + -(-self.max_step_tokens // WINDOW_PAGE) + 1

    def entry_pages(self, ratio: int) -> int:
        """Entry pages of one ratio for every sequence at full length, the null page included."""
        return self.max_batch_size * max(1, -(-(self.max_seq_len // ratio) // PAGE[ratio])) + 1


@dataclass(frozen=True)
class PoolSpec:
    """Shape of one pool of the state arena."""

    name: str
    page_rows: int
    row: int
    dtype: torch.dtype
    pages: int
    layers: int
    null: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, padding included."""
        return pool_bytes(self.page_rows, (self.row,), self.dtype, self.pages, self.layers)


def pool_specs(c: ModelConfig, limits: Limits, carrier: torch.dtype) -> tuple[PoolSpec, ...]:
    """Every pool that the limits need; draft layers have window rows of their own."""
    csa, hca = c.compress_ratios.count(4), c.compress_ratios.count(128)
    layers, slots = c.num_hidden_layers + c.draft_stages, limits.max_batch_size
    specs = [PoolSpec("window", WINDOW_PAGE, c.head_dim, carrier, limits.window_pages(c.sliding_window), layers, True)]
    if csa:
        pages = limits.entry_pages(4)
        specs += [
            PoolSpec("csa", PAGE[4], c.head_dim, carrier, pages, csa, True),
            PoolSpec("index", PAGE[4], c.index_head_dim, carrier, pages, csa, True),
            PoolSpec("csa ring", 8, 4 * c.head_dim, torch.float32, slots, csa, False),
            PoolSpec("index ring", 8, 4 * c.index_head_dim, torch.float32, slots, csa, False),
        ]
    if hca:
        specs += [
            PoolSpec("hca", PAGE[128], c.head_dim, carrier, limits.entry_pages(128), hca, True),
            PoolSpec("hca ring", 128, 2 * c.head_dim, torch.float32, slots, hca, False),
        ]
    return tuple(specs)


def state_bytes(c: ModelConfig, limits: Limits, carrier: torch.dtype) -> int:
    """Bytes that the state arena needs for ``limits``."""
    return sum(p.nbytes for p in pool_specs(c, limits, carrier))


@dataclass
class Sequence:
    """One running sequence: its slot, tokens processed, and pages by number in their kind."""

    slot: int
    length: int = 0
    window: dict[int, int] = field(default_factory=dict)
    entries: dict[int, list[int]] = field(default_factory=lambda: {4: [], 128: []})


def _check_open(seq: Sequence) -> None:
    if seq.slot == CLOSED:
        raise ContractError("a closed sequence was used; right is one that open() returned and close() did not see")


class State:
    """Pools, page tables and slots of up to ``limits.max_batch_size`` sequences.

    Raises:
        MemoryLimitError: the device cannot hold the pools; the message names needed, free and the flag.
    """

    def __init__(self, c: ModelConfig, limits: Limits, carrier: torch.dtype, services: DeviceServices) -> None:
        self.config, self.limits = c, limits
        specs = pool_specs(c, limits, carrier)
        self.arena = StateArena(services, sum(p.nbytes for p in specs))
        self.pools: dict[str, Pool] = {
            p.name: self.arena.pool(p.name, p.page_rows, (p.row,), p.dtype, p.pages, p.layers, reserve_null=p.null)
            for p in specs
        }
        self.device = services.device
        width = -(-limits.max_seq_len // WINDOW_PAGE)
        self.tables = {0: torch.zeros(limits.max_batch_size, width, dtype=torch.int32)}
        for ratio, page in PAGE.items():
            columns = max(1, -(-(limits.max_seq_len // ratio) // page))
            self.tables[ratio] = torch.zeros(limits.max_batch_size, columns, dtype=torch.int32)
        self._slots = list(range(limits.max_batch_size))
        self.caches = tuple(self._caches())

    def open(self) -> Sequence:
        """A new, empty sequence.

        Raises:
            UsageError: ``max_batch_size`` sequences are open.
        """
        if not self._slots:
            raise UsageError(
                f"max_batch_size {self.limits.max_batch_size}: all slots are in use; raise --max-batch-size"
            )
        return Sequence(self._slots.pop(0))

    def close(self, seq: Sequence) -> None:
        """Give back the sequence's pages and slot.

        Raises:
            ContractError: it is closed already.
        """
        _check_open(seq)
        self.pools["window"].allocator.give(seq.window.values())
        for ratio, pages in seq.entries.items():
            if pages:
                self.pools[KIND[ratio]].allocator.give(pages)
        seq.window, seq.entries = {}, {4: [], 128: []}
        self._slots.append(seq.slot)
        self._slots.sort()
        seq.slot = CLOSED

    def prepare(self, batch: Seq[tuple[Sequence, Seq[int]]]) -> Step:
        """Take the pages that the new tokens need and lay out one step; ``commit`` ends it.

        Args:
            batch: sequences with their new token ids, at least one id each.

        Raises:
            UsageError: a sequence would outgrow ``max_seq_len``, or the step ``max_step_tokens``.
            ContractError: a sequence is closed, or is in the step twice.
            MemoryLimitError: a pool has too few pages; nothing was taken for the failing sequence.
        """
        self._check(batch)
        for seq, ids in batch:
            self._grow(seq, seq.length + len(ids))
        return self._layout(batch)

    def commit(self, batch: Seq[tuple[Sequence, Seq[int]]]) -> None:
        """The step ran: advance lengths and free window pages that no later query can see."""
        for seq, ids in batch:
            seq.length += len(ids)
            first = max(0, seq.length - (self.config.sliding_window - 1)) // WINDOW_PAGE
            gone = [n for n in seq.window if n < first]
            self.pools["window"].allocator.give(seq.window.pop(n) for n in gone)

    def _check(self, batch: Seq[tuple[Sequence, Seq[int]]]) -> None:
        total = sum(len(ids) for _, ids in batch)
        if total > self.limits.max_step_tokens:
            raise UsageError(f"step of {total} tokens exceeds max_step_tokens {self.limits.max_step_tokens}")
        slots: set[int] = set()
        for seq, ids in batch:
            _check_open(seq)
            if seq.slot in slots:
                raise ContractError(
                    f"sequence in slot {seq.slot} is in the step twice; right is once, with all its ids"
                )
            slots.add(seq.slot)
            if not ids:
                raise UsageError(f"sequence in slot {seq.slot} has no new token; right is at least one")
            if seq.length + len(ids) > self.limits.max_seq_len:
                length = seq.length + len(ids)
                raise UsageError(f"sequence of {length} tokens exceeds max_seq_len {self.limits.max_seq_len}")

    def _grow(self, seq: Sequence, length: int) -> None:
        """Take every page up to ``length`` tokens, or none."""
        new = range(seq.length // WINDOW_PAGE, (length - 1) // WINDOW_PAGE + 1)
        missing = [n for n in new if n not in seq.window]
        counts = {0: len(missing)}
        for ratio, pages in seq.entries.items():
            counts[ratio] = max(0, -(-(length // ratio) // PAGE[ratio]) - len(pages))
        taken = self._take(counts)
        for n, page in zip(missing, taken[0], strict=True):
            seq.window[n] = page
            self.tables[0][seq.slot, n] = page
        for ratio, pages in seq.entries.items():
            if taken[ratio]:
                more = torch.tensor(taken[ratio], dtype=torch.int32)
                self.tables[ratio][seq.slot, len(pages) : len(pages) + len(more)] = more
                pages += taken[ratio]

    def _take(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """That many pages of each kind, all or none; a kind without layers has no pool and no pages."""
        taken: dict[int, list[int]] = {}
        try:
            for kind, count in counts.items():
                pool = self.pools.get(POOL[kind])
                taken[kind] = pool.allocator.take(count) if pool else []
        except MemoryLimitError:
            for kind, pages in taken.items():
                if pages:
                    self.pools[POOL[kind]].allocator.give(pages)
            raise
        return taken

    def _layout(self, batch: Seq[tuple[Sequence, Seq[int]]]) -> Step:
        counts = torch.tensor([len(ids) for _, ids in batch])
        last = counts.cumsum(0) - 1
        offsets = torch.arange(int(counts.sum())) - (last - counts + 1).repeat_interleave(counts)
        slots = torch.tensor([s.slot for s, _ in batch]).repeat_interleave(counts)
        positions = offsets + torch.tensor([s.length for s, _ in batch]).repeat_interleave(counts)
        width = min(self.config.sliding_window, int(positions.max()) + 1)
        seen = positions[:, None] - torch.arange(width - 1, -1, -1)
        held = self._rows(0, slots[:, None], seen.clamp(min=0), WINDOW_PAGE)
        window_rows = torch.where(seen >= 0, held, -1).to(torch.int32)
        tokens = torch.tensor([t for _, ids in batch for t in ids])
        on = self.device
        return Step(
            tokens.to(on),
            positions.to(on),
            slots.to(on),
            offsets.to(on),
            window_rows[:, -1].contiguous().to(on),
            window_rows.to(on),
            last.to(on),
            self._entries(4, slots, positions),
            self._entries(128, slots, positions),
        )

    def _rows(self, kind: int, slots: Tensor, numbers: Tensor, page: int) -> Tensor:
        """Pool rows of row numbers by the kind's page table, int64."""
        return self.tables[kind][slots, numbers // page].long() * page + numbers % page

    def _entries(self, ratio: int, slots: Tensor, positions: Tensor) -> Entries:
        closing = torch.nonzero((positions + 1) % ratio == 0)[:, 0]
        visible = (positions + 1) // ratio
        write = self._rows(ratio, slots[closing], positions[closing] // ratio, PAGE[ratio]).to(torch.int32)
        on = self.device
        return Entries(
            closing.to(on),
            write.to(on),
            visible.to(torch.int32).to(on),
            self.tables[ratio].to(on),
            PAGE[ratio],
            int(visible.max()),
        )

    def _caches(self) -> list[Cache]:
        """One cache per layer, draft layers last (theirs are sliding ones)."""
        made: dict[int, int] = {0: 0, 4: 0, 128: 0}
        caches = []
        for i, ratio in enumerate((*self.config.compress_ratios, *self.config.draft_ratios)):
            n, made[ratio] = made[ratio], made[ratio] + 1
            window = self.pools["window"].layer(i)
            if ratio == 0:
                caches.append(Cache(window, window[:0]))
            elif ratio == 4:
                rows = (self.pools[p].layer(n) for p in ("csa", "index"))
                rings = (self.pools[p].storage[n] for p in ("csa ring", "index ring"))
                (entries, index), (ring, index_ring) = rows, rings
                caches.append(Cache(window, entries, ring, index, index_ring))
            else:
                caches.append(Cache(window, self.pools["hca"].layer(n), self.pools["hca ring"].storage[n]))
        return caches
