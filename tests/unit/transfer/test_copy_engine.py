"""Copy engines: the right bytes, to the right pages, and nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest

from not_run import NO_CUDA
from stepwell import CacheConfig, Kind, Tier
from stepwell.base.ids import CACHED_KINDS, JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine, PageMemory
from toys import HYBRID

LAYOUTS = layouts_for(HYBRID, CacheConfig(device_bytes=64 * 32, host_bytes=32 * 32), alignment=16)


def _copy(kind: Kind, source: Tier, read: list[int], target: Tier, write: list[int]) -> Copy:
    return Copy(
        source=Span(tier=source, kind=kind, ids=np.array(read, np.int32)),
        target=Span(tier=target, kind=kind, ids=np.array(write, np.int32)),
    )


def _plan(*copies: Copy) -> Plan:
    return Plan(job=JobId(1), purpose=Purpose.SAVE, copies=copies)


class _Bench:
    """Two memories of random bytes, and what they must hold after a plan."""

    def __init__(self, make: str, device: str = "cpu") -> None:
        self._torch = make == "torch"
        if self._torch:
            pytest.importorskip("torch", reason="torch is not installed")
            from stepwell.transfer.torch_copy_engine import TorchCopyEngine
            from stepwell.transfer.torch_memory import TorchMemory

            memories = {
                Tier.DEVICE: TorchMemory(HYBRID, LAYOUTS[Tier.DEVICE], device),
                Tier.HOST: TorchMemory(HYBRID, LAYOUTS[Tier.HOST]),
            }
            self.copy_engine: CopyEngine = TorchCopyEngine(memories)
        else:
            memories = {tier: PageMemory(HYBRID, layout) for tier, layout in LAYOUTS.items()}  # type: ignore[misc]
            self.copy_engine = NumpyCopyEngine(memories)  # type: ignore[arg-type]
        self.memories = memories
        random = np.random.default_rng(7)
        for tier in memories:
            for kind in CACHED_KINDS:
                self._put(tier, kind, random.integers(0, 256, self.rows(tier, kind).shape, np.uint8))

    def rows(self, tier: Tier, kind: Kind) -> np.ndarray:
        table = self.memories[tier].rows(kind)
        return table.cpu().numpy().copy() if self._torch else np.array(table)  # type: ignore[union-attr, return-value]

    def _put(self, tier: Tier, kind: Kind, values: np.ndarray) -> None:
        table = self.memories[tier].rows(kind)
        if self._torch:
            import torch

            table.copy_(torch.from_numpy(values))  # type: ignore[union-attr]
        else:
            table[:] = values  # type: ignore[index]

    def check(self, *copies: Copy) -> None:
        before = {(tier, kind): self.rows(tier, kind) for tier in LAYOUTS for kind in CACHED_KINDS}
        raw = {tier: self._block(tier) for tier in LAYOUTS}
        self.copy_engine.begin(_plan(*copies))()
        for copy in copies:
            found = self.rows(copy.target.tier, copy.target.kind)[copy.target.ids]
            assert np.array_equal(found, before[copy.source.tier, copy.source.kind][copy.source.ids])
        for tier in LAYOUTS:
            changed = np.flatnonzero(self._block(tier) != raw[tier])
            allowed = np.zeros(len(raw[tier]), np.bool_)
            for copy in copies:
                if copy.target.tier is tier:
                    stride = LAYOUTS[tier].strides[copy.target.kind]
                    for page in copy.target.ids.tolist():
                        allowed[page * stride : (page + 1) * stride] = True
            assert allowed[changed].all(), f"{tier.label}: bytes outside the targets changed"

    def _block(self, tier: Tier) -> np.ndarray:
        return self.rows(tier, Kind.PREFIX).reshape(-1)  # 32-byte objects: this view sees every byte of the arena


@pytest.mark.parametrize("make", ["numpy", "torch"])
class TestOnTheHost:
    def test_copies_go_where_they_should_and_nowhere_else(self, make: str) -> None:
        _Bench(make).check(
            _copy(Kind.PREFIX, Tier.DEVICE, [1, 9, 4], Tier.HOST, [2, 0, 7]),
            _copy(Kind.WINDOW, Tier.DEVICE, [30, 31], Tier.HOST, [13, 12]),
            _copy(Kind.POINT, Tier.DEVICE, [63], Tier.HOST, [31]),
        )

    def test_copies_within_a_tier_and_upwards(self, make: str) -> None:
        _Bench(make).check(
            _copy(Kind.POINT, Tier.DEVICE, [5], Tier.DEVICE, [6]),
            _copy(Kind.PREFIX, Tier.HOST, [0, 31], Tier.DEVICE, [63, 0]),
        )

    def test_a_page_outside_the_memory_fails_instead_of_copying_something_else(self, make: str) -> None:
        bench = _Bench(make)
        work = bench.copy_engine.begin(_plan(_copy(Kind.PREFIX, Tier.DEVICE, [64], Tier.HOST, [0])))
        with pytest.raises(IndexError):
            work()

    def test_nothing_is_copied_before_the_work_runs(self, make: str) -> None:
        bench = _Bench(make)
        before = bench.rows(Tier.HOST, Kind.PREFIX)
        work = bench.copy_engine.begin(_plan(_copy(Kind.PREFIX, Tier.DEVICE, [1], Tier.HOST, [0])))
        assert np.array_equal(bench.rows(Tier.HOST, Kind.PREFIX), before)
        work()
        assert not np.array_equal(bench.rows(Tier.HOST, Kind.PREFIX), before)


def test_pages_are_aligned_to_their_stride_and_exposed_without_a_copy() -> None:
    memory = PageMemory(HYBRID, LAYOUTS[Tier.DEVICE])
    view = memory.view(Kind.WINDOW, 3)
    view[0] = 77
    assert memory.rows(Kind.WINDOW)[3][0] == 77 and memory.rows(Kind.PREFIX)[3][0] == 77  # one block, many views
    assert memory.rows(Kind.PREFIX).ctypes.data % 4096 == 0


def test_a_copy_names_pages_of_one_kind_and_of_equal_number() -> None:
    with pytest.raises(AssertionError, match="differ in length"):
        _copy(Kind.PREFIX, Tier.DEVICE, [1, 2], Tier.HOST, [1])


@pytest.mark.gpu
def test_torch_copies_between_pinned_host_memory_and_a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip(NO_CUDA)
    bench = _Bench("torch", "cuda")
    assert bench.memories[Tier.DEVICE].rows(Kind.PREFIX).is_cuda  # type: ignore[union-attr]
    bench.check(
        _copy(Kind.PREFIX, Tier.DEVICE, [1, 9, 4], Tier.HOST, [2, 0, 7]),
        _copy(Kind.WINDOW, Tier.HOST, [30, 31], Tier.DEVICE, [13, 12]),
        _copy(Kind.POINT, Tier.DEVICE, [63], Tier.DEVICE, [31]),
    )
