"""Copies where rows may spill: a device object and the same range of a host page, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import CacheConfig, Kind, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.transfer.copy_engine import NumpyCopyEngine
from toys import FULL, SPILLING

CONFIG = CacheConfig(device_bytes=4096, host_bytes=4096)
LAYOUTS = layouts_for(SPILLING, CONFIG, alignment=16)


def copy(kind: Kind, source: Tier, read: list[int], target: Tier, write: list[int]) -> Copy:
    """A copy of a device's pages of one kind to or from the host's prefix pages."""
    kinds = [Kind.PREFIX if tier is Tier.HOST else kind for tier in (source, target)]
    return Copy(
        source=Span(tier=source, kind=kinds[0], ids=np.array(read, np.int32)),
        target=Span(tier=target, kind=kinds[1], ids=np.array(write, np.int32)),
    )


def run(engine: str, *copies: Copy) -> tuple[dict[Tier, np.ndarray], dict[Tier, np.ndarray]]:
    """All bytes of both tiers before and after a plan."""
    rng = np.random.default_rng(3)
    blocks = {tier: rng.integers(0, 256, layout.size_bytes, np.uint8) for tier, layout in LAYOUTS.items()}
    plan = Plan(job=JobId(1), purpose=Purpose.LOAD, copies=copies)
    if engine == "numpy":
        memories = numpy_memories(SPILLING, LAYOUTS)
        for tier, memory in memories.items():
            memory.block[:] = memoryview(blocks[tier])
        NumpyCopyEngine(memories).begin(plan)()
        return blocks, {tier: np.frombuffer(memory.block, np.uint8) for tier, memory in memories.items()}
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from stepwell.transfer.torch_copy_engine import TorchCopyEngine
    from stepwell.transfer.torch_memory import TorchMemory

    tensors = {tier: TorchMemory(SPILLING, layout) for tier, layout in LAYOUTS.items()}
    for tier, tensor in tensors.items():
        tensor.bytes_B.copy_(torch.from_numpy(blocks[tier]))
    TorchCopyEngine(tensors).begin(plan)()
    return blocks, {tier: tensor.bytes_B.numpy() for tier, tensor in tensors.items()}


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("kind", [Kind.PREFIX, Kind.ROWS])
@pytest.mark.parametrize("target", [Tier.DEVICE, Tier.HOST])
def test_what_both_hold_is_copied_and_nothing_else_is_touched(engine: str, kind: Kind, target: Tier) -> None:
    source = Tier.HOST if target is Tier.DEVICE else Tier.DEVICE
    read, write = [4, 5, 6, 9], [1, 2, 3, 8]  # neighbours on both sides, whose own bytes lie between them
    before, after = run(engine, copy(kind, source, read, target, write))
    assert np.array_equal(before[source], after[source])
    start, end = SPILLING.cached_span(kind)
    stride = {Tier.DEVICE: LAYOUTS[Tier.DEVICE].strides[kind], Tier.HOST: LAYOUTS[Tier.HOST].strides[Kind.PREFIX]}
    first = {Tier.DEVICE: 0, Tier.HOST: start}
    expected = before[target].copy()
    for here, there in zip(read, write, strict=True):
        onto, of = there * stride[target] + first[target], here * stride[source] + first[source]
        expected[onto : onto + end - start] = before[source][of : of + end - start]
    assert np.array_equal(after[target], expected)


def test_strides_that_happen_to_be_equal_do_not_join_pages() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from stepwell.transfer.page_tables import PagePairs, PageTable

    ids = np.arange(4, dtype=np.int32)
    rows_PB = torch.zeros(8, 64, dtype=torch.uint8)
    whole, part = PageTable.of(rows_PB), PageTable.of(rows_PB).part(0, 48)
    joined = PagePairs(source=whole, target=whole, source_ids=ids, target_ids=ids).whole()
    apart = PagePairs(source=part, target=part, source_ids=ids, target_ids=ids).whole()
    assert [len(list(each.slices(each.runs()))) for each in (joined, apart)] == [1, 4]


def test_kinds_differ_only_between_a_host_page_and_its_rows() -> None:
    one = np.zeros(1, np.int32)
    with pytest.raises(AssertionError, match="differ in kind"):
        Copy(source=Span(tier=Tier.DEVICE, kind=Kind.PREFIX, ids=one), target=Span(tier=Tier.DEVICE, kind=Kind.ROWS, ids=one))
    with pytest.raises(AssertionError, match="differ in kind"):
        Copy(source=Span(tier=Tier.HOST, kind=Kind.POINT, ids=one), target=Span(tier=Tier.DEVICE, kind=Kind.ROWS, ids=one))


def test_without_a_spill_whole_pages_are_copied() -> None:
    made = copy(Kind.PREFIX, Tier.HOST, [0], Tier.DEVICE, [0])
    assert made.common(FULL) == (0, 0, FULL.object_bytes(Kind.PREFIX))
    assert made.common(SPILLING) == (32, 0, 12)


@pytest.mark.parametrize("step_bytes", [1, 20, 1 << 20])
def test_layers_of_both_halves_of_a_load_come_in_steps(step_bytes: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from stepwell.transfer.layer_events import layer_steps
    from stepwell.transfer.page_tables import PagePairs, PageTable

    spec, ids, loads = SPILLING, np.arange(3, dtype=np.int32), []
    for kind in (Kind.PREFIX, Kind.ROWS):
        start, end = spec.cached_span(kind)
        table = PageTable.of(torch.zeros(4, 64, dtype=torch.uint8)).part(start, end - start)
        loads.append((kind, PagePairs(source=table, target=table, source_ids=ids, target_ids=ids)))
    cut = layer_steps(spec, loads, step_bytes=step_bytes)
    assert set(cut.step_of) == {"kv", "index"}, "what is the device's own is not loaded"
    for kind, pairs in loads:
        start, end = spec.cached_span(kind)
        times = np.zeros(end - start, np.int64)
        for pieces in cut.steps:
            for piece in (each for each in pieces if each.pairs is pairs):
                times[piece.start : piece.start + piece.size_bytes] += 1
        assert (times == 1).all(), f"{kind.label}: {times}"
