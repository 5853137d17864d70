"""Arenas hand out disjoint, aligned, uninitialised memory; every shortage is one error that changes nothing."""

from __future__ import annotations

import contextlib
import contextvars
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import arena
from hal.arena import (
    PageAllocator,
    Pool,
    StateArena,
    WeightArena,
    WorkspaceArena,
    check_fits,
    footprint,
    pool_bytes,
    scratch,
    use_workspace,
    workspace,
)
from hal.device import ALIGNMENT
from hal.errors import ContractError, MemoryLimitError, UsageError
from hal_cpu.device import CpuDevice

MIB = 1 << 20
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)


class HostileDevice(CpuDevice):
    """Memory comes poisoned with ``poison`` bytes; the ``fail_at``-th allocation (from 1) finds nothing free."""

    def __init__(self, poison: int = 0xFF, fail_at: int = 0) -> None:
        super().__init__()
        self.poison, self.fail_at, self.calls = poison, fail_at, 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise MemoryLimitError(f"hostile: {nbytes} bytes needed, 0 free")
        return super().allocate(nbytes).fill_(self.poison)


def stamp(tensors: list[torch.Tensor]) -> None:
    """Write the bytes of tensor i with i + 1."""
    for i, t in enumerate(tensors):
        t.view(-1).view(torch.uint8).fill_(i + 1)


def assert_stamped(tensors: list[torch.Tensor]) -> None:
    """Every tensor still holds its own stamp, so no two share a byte."""
    for i, t in enumerate(tensors):
        assert bool((t.contiguous().view(-1).view(torch.uint8) == i + 1).all()), f"tensor {i} was overwritten"


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
requests = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


# Weights


@settings(deadline=None, max_examples=40)
@given(requests)
def test_weights_are_disjoint_aligned_and_fill_exactly_their_footprint(
    tensors: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    weights = WeightArena(HostileDevice(), footprint(tensors))
    placed = [weights.place(f"w{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
    assert [(tuple(t.shape), t.dtype) for t in placed] == tensors
    assert all(t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous() for t in placed if t.numel())
    stamp(placed)
    assert_stamped(placed)
    assert weights.report() == arena.ArenaReport("weights", footprint(tensors), footprint(tensors), footprint(tensors))


def test_weights_live_in_one_buffer() -> None:
    device = HostileDevice()
    weights = WeightArena(device, 4 * ALIGNMENT)
    a, b = weights.place("a", (3,), torch.float32), weights.place("b", (5,), torch.bfloat16)
    assert device.calls == 1
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert b.data_ptr() - a.data_ptr() == ALIGNMENT


def test_weight_overflow_names_tensor_needed_free_and_flag_and_changes_nothing() -> None:
    weights = WeightArena(HostileDevice(), 2 * ALIGNMENT)
    weights.place("a", (1,), torch.float32)
    with pytest.raises(MemoryLimitError) as e:
        weights.place("layers.0.wq", (ALIGNMENT + 1,), torch.uint8)
    for part in ("layers.0.wq", "512 bytes needed", "256 bytes free", "--weight-format", "--memory-share"):
        assert part in str(e.value)
    assert weights.used == ALIGNMENT
    assert weights.place("layers.0.wq", (ALIGNMENT,), torch.uint8).numel() == ALIGNMENT


def test_weights_refuse_a_second_placement_a_sealed_arena_and_a_negative_size() -> None:
    weights = WeightArena(HostileDevice(), MIB)
    weights.place("a", (1,), torch.float32)
    with pytest.raises(ContractError, match="a placed twice"):
        weights.place("a", (1,), torch.float32)
    with pytest.raises(ContractError, match="negative"):
        weights.place("n", (-1,), torch.float32)
    weights.seal()
    with pytest.raises(ContractError, match=r"b placed after seal"):
        weights.place("b", (1,), torch.float32)


def test_views_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        weight = WeightArena(HostileDevice(), MIB).place("a", (4,), torch.float32)
        state = StateArena(HostileDevice(), MIB).pool("kv", 2, (4,), torch.bfloat16, 2).layer(0)
    for view in (weight, state):
        view.fill_(1.0)
        assert view.sum().item() == view.numel()


# What the device gives is checked, and its errors gain the flag


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda d: WeightArena(d, MIB), "--weight-format"),
        (lambda d: StateArena(d, MIB), "--max-seq-len"),
        (lambda d: WorkspaceArena(d, MIB), "--max-batch-size"),
    ],
    ids=["weights", "state", "workspace"],
)
def test_device_out_of_memory_names_arena_and_flag(make: object, flag: str, request: pytest.FixtureRequest) -> None:
    assert callable(make)
    with pytest.raises(MemoryLimitError, match=flag) as e:
        make(HostileDevice(fail_at=1))
    assert request.node.callspec.id in str(e.value)
    assert "0 free" in str(e.value)


def test_a_device_that_returns_unaligned_memory_is_named() -> None:
    class Unaligned(CpuDevice):
        def allocate(self, nbytes: int) -> torch.Tensor:
            return super().allocate(nbytes + 1)[1:]

    with pytest.raises(ContractError, match=r"device cpu: allocate\(1048576\) returned"):
        WeightArena(Unaligned(), MIB)


# Arenas never rely on zeroed memory


@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
def test_memory_is_passed_on_as_the_device_gave_it(poison: int) -> None:
    device = HostileDevice(poison)
    work = WorkspaceArena(device)
    views = [
        WeightArena(device, MIB).place("a", (64,), torch.uint8),
        StateArena(device, MIB).pool("kv", 4, (8,), torch.uint8, 2).layer(0),
        work.take((64,), torch.uint8),
    ]
    assert all(bool((v == poison).all()) for v in views)


def test_bookkeeping_is_the_same_whatever_memory_holds() -> None:
    def run(poison: int) -> list[object]:
        state = StateArena(HostileDevice(poison), MIB)
        pool = state.pool("kv", 4, (8,), torch.float32, 8, layers=3, reserve_null=True)
        pages = pool.allocator.take(3)
        pool.allocator.give(pages[:2])
        return [pages, pool.allocator.take(1), state.report(), pool.storage.shape, pool.storage.stride()]

    assert run(0x00) == run(0xFF)


# Pages


def test_pages_are_taken_lowest_first_whatever_the_order_of_return() -> None:
    pages = PageAllocator(6)
    assert pages.take(4) == [0, 1, 2, 3]
    pages.give([3, 0, 2])
    assert pages.take(2) == [0, 2]
    assert pages.take(3) == [3, 4, 5]
    assert (pages.free, pages.used, pages.peak) == (0, 6, 6)


def test_the_null_page_is_never_handed_out_nor_accepted() -> None:
    pages = PageAllocator(3, "kv", reserve_null=True)
    assert pages.free == 2
    assert pages.take(2) == [1, 2]
    with pytest.raises(ContractError, match=r"pool kv: page 0 given back is foreign, right is 1 to 2"):
        pages.give([0])


def test_running_out_of_pages_names_pool_needed_free_and_flag_and_takes_none() -> None:
    pages = PageAllocator(4, "window")
    pages.take(1)
    with pytest.raises(MemoryLimitError) as e:
        pages.take(4)
    for part in ("pool window", "4 pages needed", "3 free", "--max-batch-size", "--max-seq-len", "--memory-share"):
        assert part in str(e.value)
    assert pages.take(3) == [1, 2, 3]


@pytest.mark.parametrize("wrong", [[0, 0], [1, 5], [-1], [1, 3], [4]], ids=str)
def test_a_wrong_return_is_refused_whole(wrong: list[int]) -> None:
    pages = PageAllocator(5)
    assert pages.take(3) == [0, 1, 2]
    with pytest.raises(ContractError, match=r"pool pages: page -?\d given back"):
        pages.give(wrong)
    assert (pages.used, pages.free) == (3, 2)
    assert pages.take(2) == [3, 4]


@pytest.mark.parametrize("make", [lambda: PageAllocator(0), lambda: PageAllocator(4).take(-1)])
def test_page_counts_below_the_least_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ContractError, match="right is"):
        make()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-6, 6), max_size=30), st.booleans())
def test_pages_agree_with_a_plain_set(steps: list[int], null: bool) -> None:
    pages, free, held = PageAllocator(12, reserve_null=null), set(range(int(null), 12)), list[int]()
    for n in steps:
        if n >= 0 and n <= len(free):
            expected = sorted(free)[:n]
            assert pages.take(n) == expected
            free -= set(expected)
            held += expected
        elif n < 0:
            back, held = held[:-n], held[-n:]
            pages.give(back)
            free |= set(back)
        assert (pages.free, pages.used) == (len(free), len(held))


# State


def test_a_page_is_addressed_as_base_plus_page_times_stride_plus_offset() -> None:
    pool = StateArena(HostileDevice(), MIB).pool("kv", 4, (3, 5), torch.float32, pages=6, layers=2)
    assert tuple(pool.storage.shape) == (2, 6, 4, 3, 5)
    layer = pool.layer(1)
    assert tuple(layer.shape) == (24, 3, 5)
    assert layer.is_contiguous()
    assert layer.data_ptr() % ALIGNMENT == 0
    layer[5 * 4 + 2] = 7.0
    assert bool((pool.storage[1, 5, 2] == 7.0).all())
    assert pool.storage[1, 5, 2].data_ptr() == layer.data_ptr() + 5 * pool.page_bytes + 2 * 3 * 5 * 4
    assert pool.page_bytes == 4 * 3 * 5 * 4


def test_pools_and_layers_share_no_byte_and_fill_exactly_what_pool_bytes_says() -> None:
    sizes = pool_bytes(4, (5,), torch.bfloat16, 3, 3) + pool_bytes(1, (7,), torch.uint8, 5)
    state = StateArena(HostileDevice(), sizes)
    kv = state.pool("kv", 4, (5,), torch.bfloat16, 3, layers=3)
    index = state.pool("index", 1, (7,), torch.uint8, 5)
    assert state.unassigned == 0
    layers = [*(kv.layer(i) for i in range(3)), index.layer(0)]
    stamp(layers)
    assert_stamped(layers)


def test_a_pool_beyond_the_budget_names_pool_needed_free_and_flag_and_changes_nothing() -> None:
    state = StateArena(HostileDevice(), 4 * ALIGNMENT)
    state.pool("kv", 1, (ALIGNMENT,), torch.uint8, 1)
    with pytest.raises(MemoryLimitError) as e:
        state.pool("index", 1, (ALIGNMENT,), torch.uint8, 4)
    for part in ("pool index", "1.00 KiB needed", "768 bytes free", "--max-batch-size", "--memory-share"):
        assert part in str(e.value)
    assert state.unassigned == 3 * ALIGNMENT
    state.pool("index", 1, (ALIGNMENT,), torch.uint8, 3)


@pytest.mark.parametrize("sizes", [{"pages": 0}, {"layers": 0}, {"page_rows": 0}, {"row_shape": (-1,)}], ids=str)
def test_a_pool_of_impossible_size_is_refused_and_its_name_stays_free(sizes: dict[str, object]) -> None:
    state = StateArena(HostileDevice(), MIB)
    good: dict[str, object] = {"page_rows": 1, "row_shape": (4,), "dtype": torch.uint8, "pages": 2}
    with pytest.raises(ContractError, match="pool kv"):
        state.pool("kv", **(good | sizes))  # type: ignore[arg-type]
    state.pool("kv", **good)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="pool kv: made twice"):
        state.pool("kv", **good)  # type: ignore[arg-type]


def test_state_reports_bytes_of_pages_in_use_and_the_peak_over_all_pools() -> None:
    state = StateArena(HostileDevice(), MIB)

    def pool(name: str, layers: int) -> Pool:
        return state.pool(name, 2, (8,), torch.float32, 4, layers=layers)

    a, b = pool("a", 2), pool("b", 1)
    pages = a.allocator.take(3)  # 3 pages x 2 layers x 64 bytes
    a.allocator.give(pages)
    b.allocator.take(1)
    assert state.report() == arena.ArenaReport("state", 64, 384, MIB)


# Workspace


def test_a_step_reuses_the_memory_of_the_step_before() -> None:
    device = HostileDevice()
    work = WorkspaceArena(device, 4 * ALIGNMENT)
    first = [work.take((10,), torch.float32).data_ptr(), work.take((3, 3), torch.bfloat16).data_ptr()]
    work.begin_step()
    assert [work.take((10,), torch.float32).data_ptr(), work.take((3, 3), torch.bfloat16).data_ptr()] == first
    assert device.calls == 1


@settings(deadline=None, max_examples=40)
@given(requests)
def test_views_of_a_step_are_disjoint_while_growing_and_after(
    tensors: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    device = HostileDevice()
    work = WorkspaceArena(device)
    for _ in range(2):
        work.begin_step()
        views = [work.take(shape, dtype) for shape, dtype in tensors]
        assert all(v.data_ptr() % ALIGNMENT == 0 for v in views if v.numel())
        stamp(views)
        assert_stamped(views)
    work.freeze()
    calls = device.calls
    stamp([work.take(shape, dtype) for shape, dtype in tensors])
    assert device.calls == calls
    assert work.report() == arena.ArenaReport("workspace", *[footprint(tensors)] * 3)


def test_a_frozen_workspace_never_grows_and_says_which_flag() -> None:
    device = HostileDevice()
    work = WorkspaceArena(device)
    work.take((ALIGNMENT,), torch.uint8)
    work.freeze()
    work.take((1,), torch.uint8)
    with pytest.raises(MemoryLimitError) as e:
        work.take((1,), torch.uint8)
    for part in ("256 bytes needed", "capacity 256 bytes", "frozen", "--max-batch-size"):
        assert part in str(e.value)
    assert (device.calls, work.used) == (1, ALIGNMENT)
    assert work.take((0, 5), torch.float32).shape == (0, 5)


def test_a_scope_gives_its_memory_back_within_the_step() -> None:
    work = WorkspaceArena(HostileDevice())
    kept = work.take((4,), torch.float32)
    for _ in range(61):
        with work.scope():
            inner = [work.take((100,), torch.float32), work.take((7,), torch.int64)]
            stamp([kept, *inner])
            assert_stamped([kept, *inner])
    assert work.peak == footprint([((4,), torch.float32), ((100,), torch.float32), ((7,), torch.int64)])
    assert work.used == ALIGNMENT
    work.freeze()
    assert work.capacity == work.peak
    with work.scope():
        outer = work.take((4,), torch.float32).data_ptr()
    assert work.take((4,), torch.float32).data_ptr() == outer


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_an_allocation_that_fails_in_warm_up_leaves_the_workspace_usable(fail_at: int) -> None:
    device = HostileDevice(fail_at=fail_at)
    work = WorkspaceArena(device)
    failures = 0
    for _ in range(3):
        before = work.used
        try:
            work.take((ALIGNMENT,), torch.uint8)
        except MemoryLimitError:
            failures += 1
            assert work.used == before
    assert (failures, work.used) == (1, 2 * ALIGNMENT)
    work.freeze()
    assert work.capacity == work.peak == 2 * ALIGNMENT


def test_a_merge_that_fails_leaves_an_empty_workspace_that_can_grow_again() -> None:
    work = WorkspaceArena(HostileDevice(fail_at=3))
    work.take((ALIGNMENT,), torch.uint8)
    work.take((ALIGNMENT,), torch.uint8)
    with pytest.raises(MemoryLimitError, match="workspace"):
        work.freeze()
    assert (work.capacity, work.used) == (0, 0)
    work.take((ALIGNMENT,), torch.uint8)
    assert work.capacity == ALIGNMENT


# Scratch


def test_scratch_comes_from_the_active_workspace_and_is_new_memory_without_one() -> None:
    work = WorkspaceArena(HostileDevice(), MIB)
    assert workspace() is None
    with use_workspace(work):
        assert workspace() is work
        scratch((3,), torch.float32, torch.device("cpu"))
        assert work.used == ALIGNMENT
        assert contextvars.Context().run(workspace) is None
    free = scratch((2, 3), torch.bfloat16, torch.device("cpu"))
    assert (tuple(free.shape), free.dtype, work.used) == ((2, 3), torch.bfloat16, ALIGNMENT)


def test_the_workspace_is_inactive_again_after_an_error() -> None:
    work = WorkspaceArena(HostileDevice(), ALIGNMENT)
    with contextlib.suppress(MemoryLimitError), use_workspace(work):
        scratch((MIB,), torch.float32, torch.device("cpu"))
    assert workspace() is None


def test_scratch_on_another_device_than_the_workspace_is_refused() -> None:
    with use_workspace(WorkspaceArena(HostileDevice(), MIB)), pytest.raises(ContractError, match="meta was asked"):
        scratch((1,), torch.float32, torch.device("meta"))


# The whole


def test_parts_that_fit_pass_up_to_the_last_byte() -> None:
    check_fits({"weights": 60, "state": 30}, free=100, share=0.9)
    with pytest.raises(MemoryLimitError):
        check_fits({"weights": 60, "state": 31}, free=100, share=0.9)


def test_parts_that_do_not_fit_are_all_named_with_needed_free_and_flags() -> None:
    with pytest.raises(MemoryLimitError) as e:
        check_fits({"weights": 3 * MIB, "state": 2 * MIB, "workspace": MIB}, free=5 * MIB, share=0.8)
    assert str(e.value) == (
        "memory: weights 3.00 MiB + state 2.00 MiB + workspace 1.00 MiB = 6.00 MiB needed (6291456 bytes), "
        "4.00 MiB granted: 5.00 MiB free x memory share 0.8; "
        "lower --max-seq-len or --max-batch-size, or raise --memory-share"
    )


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, math.nan])
def test_a_share_outside_its_range_names_the_flag(share: float) -> None:
    with pytest.raises(UsageError, match="--memory-share"):
        check_fits({"weights": 1}, free=10, share=share)
