"""Three arenas with three lifetimes over flat device memory: weights (once), state (pages), workspace (per step).

Every view starts at a multiple of :data:`hal.device.ALIGNMENT` bytes and its contents are *undefined* until written.
An error leaves an arena as it was. An arena is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from hal.device import ALIGNMENT, DeviceServices, format_bytes
from hal.errors import ContractError, MemoryLimitError, UsageError

WEIGHTS_FLAG = "--weight-format or --memory-share"
STATE_FLAG = "--max-batch-size, --max-seq-len or --memory-share"
WORKSPACE_FLAG = "--max-batch-size or --memory-share"


@dataclass(frozen=True)
class ArenaReport:
    """Bytes in use now, most bytes ever in use, and bytes that the arena owns."""

    name: str
    used: int
    peak: int
    capacity: int


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _tensor_bytes(what: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    if any(n < 0 for n in shape):
        raise ContractError(f"{what}: shape {list(shape)} has a negative size, right is 0 or more")
    return math.prod(shape) * dtype.itemsize


def footprint(tensors: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
    """Bytes that tensors of these (shape, dtype) take in an arena, padding included."""
    return sum(_round_up(_tensor_bytes("footprint", shape, dtype)) for shape, dtype in tensors)


def _exceeded(what: str, needed: int, free: int, flag: str) -> MemoryLimitError:
    sizes = f"{format_bytes(needed)} needed ({needed} bytes), {format_bytes(free)} free ({free} bytes)"
    return MemoryLimitError(f"{what}: {sizes}; change {flag}")


def _allocate(what: str, services: DeviceServices, nbytes: int, flag: str) -> torch.Tensor:
    """``nbytes`` from the device; its error gains the arena's name and the flag to turn."""
    try:
        buffer = services.allocate(nbytes)
    except MemoryLimitError as e:
        raise MemoryLimitError(f"{what}: {e}; change {flag}") from e
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (nbytes,) or buffer.data_ptr() % ALIGNMENT:
        seen = f"{buffer.dtype}{list(buffer.shape)} at address {buffer.data_ptr():#x}"
        raise ContractError(f"device {services.device}: allocate({nbytes}) returned {seen}, right is aligned uint8")
    return buffer


def _view(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    end = start + math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):  # a view by dtype made in inference mode could not be written outside it
        return buffer[start:end].view(dtype).view(tuple(shape))


class WeightArena:
    """Weights: one buffer of ``nbytes`` bytes (rounded up to the alignment), filled once, never freed piecewise.

    Raises:
        MemoryLimitError: the device has not ``nbytes`` free.
    """

    def __init__(self, services: DeviceServices, nbytes: int) -> None:
        self._buffer = _allocate("weights", services, _round_up(nbytes), WEIGHTS_FLAG)
        self._names: set[str] = set()
        self._sealed = False
        self.used = 0

    @property
    def capacity(self) -> int:
        """Bytes reserved."""
        return self._buffer.numel()

    @property
    def peak(self) -> int:
        """Most bytes ever in use: weights are never given back."""
        return self.used

    def place(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialised view for the weight ``name``.

        Raises:
            MemoryLimitError: the rest of the buffer is too small; names tensor, needed, free and the flag.
            ContractError: ``name`` was placed before, or the arena is sealed.
        """
        if self._sealed:
            raise ContractError(f"weights: {name} placed after seal()")
        if name in self._names:
            raise ContractError(f"weights: {name} placed twice")
        needed, free = _round_up(_tensor_bytes(name, shape, dtype)), self.capacity - self.used
        if needed > free:
            raise _exceeded(f"weights: {name} {list(shape)}", needed, free, WEIGHTS_FLAG)
        view = _view(self._buffer, self.used, shape, dtype)
        self.used += needed
        self._names.add(name)
        return view

    def seal(self) -> None:
        """Loading is over: further placement is a ContractError."""
        self._sealed = True

    def report(self) -> ArenaReport:
        """Used, peak and capacity."""
        return ArenaReport("weights", self.used, self.peak, self.capacity)


class PageAllocator:
    """Numbers of free and used pages: ``take`` hands out the lowest free ones, so that runs repeat.

    With ``reserve_null`` page 0 is never handed out; it stands for "no page" in page tables.
    """

    def __init__(self, pages: int, name: str = "pages", *, reserve_null: bool = False) -> None:
        if pages < 1:
            raise ContractError(f"pool {name}: {pages} pages, right is 1 or more")
        self._name = name
        self._first, self._end = int(reserve_null), pages
        self._free = list(range(self._first, pages))  # sorted, hence a heap
        self._taken: set[int] = set()
        self._on_take: Callable[[], None] | None = None
        self.peak = 0

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages handed out and not given back."""
        return len(self._taken)

    def observe(self, on_take: Callable[[], None]) -> None:
        """Call ``on_take`` after every take."""
        self._on_take = on_take

    def take(self, n: int) -> list[int]:
        """The ``n`` lowest free pages, ascending; all of them or none.

        Raises:
            MemoryLimitError: fewer are free; names pool, needed, free and the flag.
            ContractError: ``n`` is negative.
        """
        if n < 0:
            raise ContractError(f"pool {self._name}: take({n}), right is 0 or more pages")
        if n > self.free:
            raise MemoryLimitError(f"pool {self._name}: {n} pages needed, {self.free} free; change {STATE_FLAG}")
        pages = [heapq.heappop(self._free) for _ in range(n)]
        self._taken.update(pages)
        self.peak = max(self.peak, self.used)
        if self._on_take is not None:
            self._on_take()
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Give pages back; all of them or none.

        Raises:
            ContractError: a page of another pool, the null page, or a page that is not in use (given twice).
        """
        returned: set[int] = set()
        for page in (given := list(pages)):
            if not self._first <= page < self._end:
                right = f"right is {self._first} to {self._end - 1}"
                raise ContractError(f"pool {self._name}: page {page} given back is foreign, {right}")
            if page not in self._taken or page in returned:
                raise ContractError(f"pool {self._name}: page {page} given back is not in use")
            returned.add(page)
        self._taken -= returned
        for page in given:
            heapq.heappush(self._free, page)


@dataclass(frozen=True)
class Pool:
    """Equal pages of rows: row ``r`` of page ``p`` of layer ``l`` is ``storage[l, p, r]``.

    ``storage[layers, pages, page_rows, *row_shape]``: each layer is contiguous, layers are padded to the alignment.
    A page number is valid in every layer. Contents are undefined until written, and again after a page changes hands.
    """

    name: str
    storage: torch.Tensor
    allocator: PageAllocator

    @property
    def page_rows(self) -> int:
        """Rows of one page."""
        return self.storage.shape[2]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer: the stride of page addresses."""
        return self.storage[0, 0].numel() * self.storage.itemsize

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages handed out, over all layers."""
        return self.allocator.used * self.page_bytes * self.storage.shape[0]

    def layer(self, i: int) -> torch.Tensor:
        """Layer ``i`` as contiguous rows ``[pages * page_rows, *row_shape]``; row = page * page_rows + offset."""
        return self.storage[i].flatten(0, 1)


def _layer_bytes(what: str, page_rows: int, row_shape: Sequence[int], dtype: torch.dtype, pages: int) -> int:
    return _round_up(_tensor_bytes(what, (pages, page_rows, *row_shape), dtype))


def pool_bytes(page_rows: int, row_shape: Sequence[int], dtype: torch.dtype, pages: int, layers: int = 1) -> int:
    """Bytes that :meth:`StateArena.pool` takes for these arguments, padding included."""
    return layers * _layer_bytes("pool", page_rows, row_shape, dtype, pages)


class StateArena:
    """State: one buffer of ``budget_bytes`` bytes, allocated once and divided into pools of pages.

    Raises:
        MemoryLimitError: the device has not ``budget_bytes`` free.
    """

    def __init__(self, services: DeviceServices, budget_bytes: int) -> None:
        self._buffer = _allocate("state", services, budget_bytes, STATE_FLAG)
        self._pools: dict[str, Pool] = {}
        self._divided = 0
        self.peak = 0

    @property
    def capacity(self) -> int:
        """Bytes of the budget."""
        return self._buffer.numel()

    @property
    def unassigned(self) -> int:
        """Bytes that belong to no pool yet."""
        return self.capacity - self._divided

    @property
    def used(self) -> int:
        """Bytes of all pages handed out."""
        return sum(pool.used_bytes for pool in self._pools.values())

    def pool(
        self,
        name: str,
        page_rows: int,
        row_shape: Sequence[int],
        dtype: torch.dtype,
        pages: int,
        layers: int = 1,
        *,
        reserve_null: bool = False,
    ) -> Pool:
        """Set ``layers`` x ``pages`` pages of ``page_rows`` rows of ``row_shape`` aside.

        Raises:
            MemoryLimitError: the rest of the budget is too small; names pool, needed, free and the flag.
            ContractError: the name is taken, or a size is below 1.
        """
        if name in self._pools:
            raise ContractError(f"pool {name}: made twice")
        if layers < 1 or page_rows < 1:
            raise ContractError(f"pool {name}: {layers} layers of {page_rows} rows a page, right is 1 or more")
        allocator = PageAllocator(pages, name, reserve_null=reserve_null)
        stride = _layer_bytes(f"pool {name}", page_rows, row_shape, dtype, pages)
        if layers * stride > self.unassigned:
            raise _exceeded(f"pool {name}", layers * stride, self.unassigned, STATE_FLAG)
        flat = _view(self._buffer, self._divided, (layers, stride // dtype.itemsize), dtype)
        dense = flat[:, : math.prod((pages, page_rows, *row_shape))]
        pool = Pool(name, dense.view(layers, pages, page_rows, *row_shape), allocator)
        allocator.observe(self._note_peak)
        self._pools[name] = pool
        self._divided += layers * stride
        return pool

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.used)

    def report(self) -> ArenaReport:
        """Bytes of pages in use, their peak, and the budget."""
        return ArenaReport("state", self.used, self.peak, self.capacity)


class WorkspaceArena:
    """Workspace of a step: views that all become invalid at the next :meth:`begin_step`.

    With ``capacity`` (bytes) all of it is allocated at once and it never grows. Without, it grows on demand during
    warm-up until :meth:`freeze`. From then on addresses repeat from step to step, as captured graphs need.
    """

    def __init__(self, services: DeviceServices, capacity: int | None = None) -> None:
        self._services = services
        self._blocks: list[torch.Tensor] = []
        if capacity is not None:
            self._blocks = [_allocate("workspace", services, _round_up(capacity), WORKSPACE_FLAG)]
        self._frozen = capacity is not None
        self._at = (0, 0)  # block, offset in bytes
        self.used = 0
        self.peak = 0

    @property
    def device(self) -> torch.device:
        """Where the views live."""
        return self._services.device

    @property
    def capacity(self) -> int:
        """Bytes allocated now."""
        return sum(block.numel() for block in self._blocks)

    def begin_step(self) -> None:
        """Start over: every view handed out before is invalid; blocks that grew in warm-up become one."""
        self._at, self.used = (0, 0), 0
        if len(self._blocks) > 1:
            self._merge()

    def freeze(self) -> None:
        """End warm-up, between steps: start over as one block of the peak, which never grows again."""
        self.begin_step()
        self._frozen = True

    def _merge(self) -> None:
        self._blocks = []  # freed first: both would not always fit; if the allocation fails the arena is empty
        self._blocks = [_allocate("workspace", self._services, self.peak, WORKSPACE_FLAG)]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialised view for this step.

        Raises:
            MemoryLimitError: frozen and full, or the device has no more; names needed, capacity and the flag.
        """
        needed = _round_up(_tensor_bytes("workspace", shape, dtype))
        if needed == 0:  # an arena that was frozen empty has no block to point into
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        block, offset = self._find(needed)
        self._at = (block, offset + needed)
        self.used += needed
        self.peak = max(self.peak, self.used)
        return _view(self._blocks[block], offset, shape, dtype)

    def _find(self, needed: int) -> tuple[int, int]:
        """Block and offset of ``needed`` bytes at or after the present position; grows in warm-up."""
        block, offset = self._at
        while block < len(self._blocks):
            if offset + needed <= self._blocks[block].numel():
                return block, offset
            block, offset = block + 1, 0
        if self._frozen:
            sizes = f"{format_bytes(needed)} needed beside {format_bytes(self.used)} in use"
            held = f"capacity {format_bytes(self.capacity)} ({self.capacity} bytes)"
            raise MemoryLimitError(f"workspace: {sizes}, {held}, and it is frozen; change {WORKSPACE_FLAG}")
        self._blocks.append(_allocate("workspace", self._services, needed, WORKSPACE_FLAG))
        return block, 0

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Views taken inside are invalid afterwards and their memory serves again in the same step."""
        at, used = self._at, self.used
        try:
            yield
        finally:
            self._at, self.used = at, used

    def report(self) -> ArenaReport:
        """Bytes in use in this step, the peak of all steps, and bytes allocated."""
        return ArenaReport("workspace", self.used, self.peak, self.capacity)


_WORKSPACE: ContextVar[WorkspaceArena | None] = ContextVar("hal_workspace", default=None)


def workspace() -> WorkspaceArena | None:
    """The workspace that is active in this context."""
    return _WORKSPACE.get()


@contextlib.contextmanager
def use_workspace(arena: WorkspaceArena) -> Iterator[None]:
    """Make ``arena`` serve :func:`scratch` in this context."""
    token = _WORKSPACE.set(arena)
    try:
        yield
    finally:
        _WORKSPACE.reset(token)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for a kernel until the step ends: from the active workspace, or new where none is active.

    Raises:
        ContractError: the active workspace lives on another device.
        MemoryLimitError: the workspace is full.
    """
    arena = _WORKSPACE.get()
    if arena is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if not _same_device(arena.device, device):
        raise ContractError(f"scratch: {device} was asked for, the active workspace is on {arena.device}")
    return arena.take(shape, dtype)


def check_fits(needed_by_part: Mapping[str, int], free: int, share: float) -> None:
    """Check before any allocation that all parts (name -> bytes) together fit in ``share`` of ``free`` bytes.

    Raises:
        MemoryLimitError: they do not; names the parts, the total, what is free and the flags.
        UsageError: ``share`` is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--memory-share {share}: right is above 0 and at most 1")
    total, granted = sum(needed_by_part.values()), int(free * share)
    if total <= granted:
        return
    parts = " + ".join(f"{name} {format_bytes(n)}" for name, n in needed_by_part.items())
    sizes = f"{parts} = {format_bytes(total)} needed ({total} bytes)"
    left = f"{format_bytes(granted)} granted: {format_bytes(free)} free x memory share {share:g}"
    remedy = "lower --max-seq-len or --max-batch-size" + (", or raise --memory-share" if share < 1 else "")
    raise MemoryLimitError(f"memory: {sizes}, {left}; {remedy}")
