"""A cache below an engine that owns its device memory: pages go to and from addresses the engine names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepwell import Cause, ConfigError, EnginePages, Kind, Lease, LeaseError, LeaseState, ModelSpec, Tier, build_cache
from stepwell.cache.build import layouts_for
from stepwell.testing import ScriptedExecutor
from stepwell.transfer.copy_engine import NumpyCopyEngine, PageMemory
from toys import ALL_MODELS, FULL, HYBRID, KV, SMALL_PAGES, SSM, Rig, model, swa, text


class BorrowedRig(Rig):
    """A rig without a device tier, and an engine with 64 objects of its own."""

    def __init__(self, spec: ModelSpec = HYBRID, *, host_pages: int = 256, **config: object) -> None:
        super().__init__(spec, device_pages=None, host_pages=host_pages, **config)  # type: ignore[arg-type]
        (host,) = layouts_for(spec, self.config, alignment=self.tuning.page_alignment_bytes).values()
        self.engine_memory = PageMemory(spec, host)
        memories = {Tier.HOST: self.memories[0][Tier.HOST], Tier.ENGINE: self.engine_memory}
        self.executor = ScriptedExecutor([NumpyCopyEngine(memories)])
        self.cache = build_cache(
            spec, self.config, executor=self.executor, clock=self.clock, on_free=self.engine.poison, tuning=self.tuning
        )
        self.state, self.tree = self.cache._state, self.cache._state.tree
        self._random = np.random.default_rng(1)

    def pages(self, tokens: int, *, start: int = 0) -> EnginePages:
        """The engine's names for a prompt's pages and for a checkpoint at its last boundary; kinds do not overlap."""
        count = tokens // self.spec.page_tokens
        windows = len(self.spec.window_span(count * self.spec.page_tokens))
        names = np.arange(start, start + count + windows + 1, dtype=np.int32)
        points = names[-1:] if self.spec.parts(Kind.POINT) else names[:0]
        return EnginePages(prefix=names[:count], windows=names[count : count + windows], points=points)

    def fill(self, pages: EnginePages) -> dict[Kind, np.ndarray]:
        """The engine computes: random bytes at its own addresses. Returns a copy of them."""
        saved = {}
        for kind, ids in ((Kind.PREFIX, pages.prefix), (Kind.WINDOW, pages.windows), (Kind.POINT, pages.points)):
            if len(ids):
                rows = self.engine_memory.rows(kind)
                rows[ids] = self._random.integers(0, 256, rows[ids].shape, np.uint8)
                saved[kind] = rows[ids].copy()
        return saved

    def read(self, pages: EnginePages) -> dict[Kind, np.ndarray]:
        spans = ((Kind.PREFIX, pages.prefix), (Kind.WINDOW, pages.windows), (Kind.POINT, pages.points))
        return {kind: self.engine_memory.rows(kind)[ids].copy() for kind, ids in spans if len(ids)}

    def save(self, tokens: list[int]) -> tuple[Lease, dict[Kind, np.ndarray]]:
        lease = self.open(tokens)
        pages = self.pages(len(tokens) - 1)
        saved = self.fill(pages)
        self.cache.commit(lease, self.spec.usable(len(tokens)), source=pages)
        return lease, saved


BORROWED = ALL_MODELS | {"point alone": model(SSM), "window alone": model(swa(8))}  # without prefix pages that hold anything


@pytest.mark.parametrize("spec", BORROWED)
def test_what_the_engine_saved_comes_back_at_other_addresses(spec: str) -> None:
    rig = BorrowedRig(BORROWED[spec])
    lease, saved = rig.save(text(1, 17))
    rig.settle()
    rig.cache.release(lease)
    again = rig.open(text(1, 17))
    assert (again.resume, again.sources.host, again.sources.computed) == (16, 16, 1)
    target = rig.pages(16, start=20)
    rig.cache.load(again, target)
    assert again.state is LeaseState.LOADING
    assert rig.settle().ready == (again,)
    found = rig.read(target)
    assert found.keys() == saved.keys() and all(np.array_equal(found[kind], saved[kind]) for kind in saved)
    rig.cache.release(again)
    rig.idle_check()


def test_nothing_is_visible_before_the_engine_memory_was_read() -> None:
    rig = BorrowedRig()
    lease, _ = rig.save(text(1, 17))
    assert rig.restore(text(1, 17)) == 0 and rig.cache.explain(text(1, 17)).cause is Cause.ARRIVING
    assert lease.jobs  # the engine must leave its memory alone until these are gone
    rig.settle()
    assert not lease.jobs and rig.restore(text(1, 17)) == 16
    rig.cache.release(lease)
    rig.idle_check()


def test_a_checkpoint_is_not_the_next_states_bytes() -> None:
    """The engine computes on as soon as the lease is ready: by then the checkpoint must have been copied."""
    rig = BorrowedRig(model(KV, SSM))
    prompt = text(1, 25)
    lease, pages = rig.open(prompt, hints=(16,)), rig.pages(24)
    rig.fill(pages)
    assert rig.cache.commit(lease, 16, source=pages) and rig.cache.step().ready == ()
    assert lease.state is LeaseState.LOADING, "its point is still being read"
    with pytest.raises(LeaseError, match="loading"):
        rig.cache.commit(lease, 24, source=pages)
    committed = rig.read(pages)[Kind.POINT]
    assert rig.settle().ready == (lease,)
    rig.fill(pages)  # the next state, in place
    rig.cache.release(lease)
    again = rig.open(prompt[:17])
    rig.cache.load(again, rig.pages(16, start=40))
    rig.settle()
    assert np.array_equal(rig.read(rig.pages(16, start=40))[Kind.POINT], committed)
    rig.cache.release(again)
    rig.idle_check()


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_that_could_not_be_saved_does_not_fail_its_request(late: bool) -> None:
    rig = BorrowedRig(model(KV, SSM), tuning=replace(SMALL_PAGES, copy_timeout_s=2.0))
    lease, pages = rig.open(text(1, 25), hints=(16,)), rig.pages(24)
    rig.fill(pages)
    rig.cache.commit(lease, 16, source=pages)
    if late:
        rig.clock.advance(2.1)
    report = rig.cache.step() if late else rig.fail_all()
    assert report.failures and report.ready == (lease,) and not report.failed
    rig.settle()
    assert rig.restore(text(1, 25)) == 0, "nothing of it may be used"
    rig.cache.release(lease)
    rig.idle_check()


def test_full_pages_hold_nobody_up() -> None:
    rig = BorrowedRig(FULL)
    lease, pages = rig.open(text(1, 33)), rig.pages(32)
    rig.fill(pages)
    rig.cache.commit(lease, 16, source=pages)
    assert lease.ready and lease.jobs
    rig.cache.release(lease)
    rig.settle()
    rig.idle_check()


def test_a_failed_save_is_offered_again_with_the_next_commit() -> None:
    """The engine still has the bytes: pages whose copy failed are copied anew, not offered to the tree as they are."""
    rig = BorrowedRig(FULL)
    prompt = text(1, 33)
    lease, pages = rig.open(prompt), rig.pages(32)
    saved = rig.fill(pages)
    rig.cache.commit(lease, 16, source=pages)
    assert rig.fail_all().failures
    rig.cache.commit(lease, 32, source=pages)
    rig.settle()
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.restore(prompt) == 32
    again = rig.open(prompt)
    rig.cache.load(again, rig.pages(32, start=8))
    rig.settle()
    assert np.array_equal(rig.read(rig.pages(32, start=8))[Kind.PREFIX], saved[Kind.PREFIX])
    rig.cache.release(again)


def test_a_neighbours_failed_save_is_not_offered_as_ones_own() -> None:
    rig = BorrowedRig(FULL)
    prompt = text(1, 33)
    pages = rig.pages(32)
    rig.fill(pages)
    first, second = rig.open(prompt), rig.open(prompt)
    rig.cache.commit(first, 16, source=pages)
    rig.cache.commit(second, 16, source=pages)  # refers to the first one's pages, which are on their way
    rig.fail_all()
    rig.cache.release(first)
    rig.cache.commit(second, 32, source=pages)
    rig.settle()
    rig.cache.release(second)
    rig.idle_check()
    assert rig.restore(prompt) == 32


def test_pages_saved_by_another_request_first_are_shared() -> None:
    rig = BorrowedRig(FULL)
    first, _ = rig.save(text(1, 17))
    second, _ = rig.save(text(1, 17))
    assert first.prefix_pages.tolist() == second.prefix_pages.tolist()
    assert rig.used(Tier.HOST, Kind.PREFIX) == 4
    for lease in (first, second):
        rig.cache.release(lease)
    rig.idle_check()


def test_a_host_without_room_saves_nothing_and_says_so() -> None:
    rig = BorrowedRig(FULL, host_pages=8)
    holder, _ = rig.save(text(1, 29))
    lease = rig.open(text(2, 17))
    assert rig.cache.commit(lease, 16, source=rig.pages(16)) is False
    assert rig.cache.counters["save_skipped_no_room"] == 1 and lease.position == 16 and len(lease.prefix_pages) == 0
    rig.cache.release(holder)
    rig.settle()
    rig.cache.commit(lease, 16, source=rig.pages(16))  # offered again, and now there is space
    rig.settle()
    assert rig.restore(text(2, 17)) == 16
    rig.cache.release(lease)
    rig.idle_check()


def test_a_lease_given_back_with_copies_under_way_is_reported_when_they_end() -> None:
    rig = BorrowedRig()
    lease, _ = rig.save(text(1, 17))
    rig.cache.release(lease)
    assert lease.jobs and rig.cache.step().finished == ()
    rig.executor.finish_all()
    assert rig.cache.step().finished == (lease,) and not lease.jobs
    assert rig.cache.step().finished == ()
    rig.idle_check()


def test_a_failed_load_fails_the_lease_and_forgets_the_source() -> None:
    rig = BorrowedRig()
    lease, _ = rig.save(text(1, 17))
    rig.settle()
    rig.cache.release(lease)
    again = rig.open(text(1, 17))
    rig.cache.load(again, rig.pages(16, start=20))
    assert rig.fail_all().failed == (again,)
    rig.cache.release(again)
    rig.idle_check()
    assert rig.restore(text(1, 17)) == 0


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        (EnginePages(), "named 0 from page 0 on"),
        (EnginePages(prefix=np.arange(4, dtype=np.int32)), "named 0 and 0"),
        (EnginePages(prefix=np.arange(4, dtype=np.int32), windows=np.arange(1, dtype=np.int32)), "named 1 and 0"),
    ],
)
def test_a_commit_that_names_too_little_changes_nothing(pages: EnginePages, says: str) -> None:
    rig = BorrowedRig(model(KV, swa(8), SSM))
    lease = rig.open(text(1, 17))
    with pytest.raises(LeaseError, match=says):
        rig.cache.commit(lease, 16, source=pages)
    rig.cache.audit()
    assert lease.position == 0 and not rig.executor.pending and rig.cache.stats().tier(Tier.HOST).used_bytes == 0
    rig.cache.release(lease)


def test_a_load_that_names_too_little_changes_nothing() -> None:
    rig = BorrowedRig()
    lease, _ = rig.save(text(1, 17))
    rig.settle()
    rig.cache.release(lease)
    again = rig.open(text(1, 17))
    with pytest.raises(LeaseError, match="the engine named only 2"):
        rig.cache.load(again, EnginePages(prefix=np.arange(2, dtype=np.int32)))
    assert again.ready and not rig.executor.pending
    rig.cache.release(again)
    rig.idle_check()


def test_verbs_that_need_another_set_of_tiers_say_so() -> None:
    rig = BorrowedRig()
    lease = rig.open(text(1, 17))
    with pytest.raises(ConfigError, match=r"grow\(\) needs a device tier"):
        rig.cache.grow(lease, 20)
    with pytest.raises(LeaseError, match="needs `source`"):
        rig.cache.commit(lease, 16)
    rig.cache.release(lease)
    rig.idle_check()
    both = Rig(HYBRID)
    with both.open(text(1, 17)) as lease, pytest.raises(ConfigError, match="without a device tier"):
        both.cache.load(lease, EnginePages())
    both.idle_check()
