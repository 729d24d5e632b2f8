"""Known bugs of earlier systems, groups F and G: aborts and failures, and data that is kept but cannot be reached."""

from __future__ import annotations

import pytest

from stepwell import Cause, Kind, LeaseState, NoRoom, PlacementConfig, Point, StateSpec, Tier, WritePolicy
from stepwell.base.ids import CACHED_KINDS
from stepwell.base.tasks import Purpose
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import ABSENT, LossReason, Residency
from toys import ALL_MODELS, FULL_POINT, FULL_WINDOW, HYBRID, KV, OBJECT_BYTES, Rig, model, text


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_abort_during_load_leaves_no_stale_state(spec: str) -> None:
    """F1: a request that goes away while its state arrives leaves nothing half-made for the next one."""
    rig = Rig(ALL_MODELS[spec], host_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    rig.cache.release(rig.open(prompt))
    rig.cache.audit()
    rig.serve(text(2, 17))  # may get the same pages
    assert rig.serve(prompt).computed == 1


@pytest.mark.parametrize("moment", ["before the load", "after the load", "in prefill", "at a fork", "in decode"])
def test_abort_at_any_moment_gives_everything_back(moment: str) -> None:
    """F1: whenever a request is dropped, what it held is free again and what it committed is right."""
    rig = Rig(HYBRID, host_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open([*prompt, *text(2, 16)])
    if moment != "before the load":
        rig.settle()
    if moment in ("in prefill", "in decode"):
        rig.prefill(lease, 19 if moment == "in prefill" else None)
    if moment == "at a fork":
        rig.compute(lease, 32)
        assert lease.state is LeaseState.LOADING
    if moment == "in decode":
        rig.decode(lease, [1, 2, 3])
    rig.cache.release(lease)
    rig.cache.audit()
    rig.idle_check()
    assert rig.serve([*prompt, *text(2, 16)]).computed <= 17


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.EXCLUSIVE])
def test_failed_save_then_eviction_is_a_miss_and_says_why(write: WritePolicy) -> None:
    """F2: a copy that failed does not count as one: when the device evicts its page, the prompt is computed again."""
    rig = Rig(HYBRID, host_pages=64, write=write)
    prompt = text(1, 17)
    lease = rig.ready(prompt)
    rig.compute(lease, 16, last=True)
    rig.cache.release(lease)
    rig.evict_idle(Tier.DEVICE)
    while rig.executor.pending:
        report = rig.fail_all()
        assert report.failures and "made to fail" in report.failures[0]
        rig.cache.audit()
        rig.evict_idle(Tier.DEVICE)
    assert rig.restore(prompt) == 0
    assert rig.cache.explain(prompt).cause in (Cause.EVICTED, Cause.FAILED)
    assert not any(rig.used(tier, kind) for tier in (Tier.DEVICE, Tier.HOST) for kind in CACHED_KINDS)
    assert rig.serve(prompt).computed == 17


def test_refused_acquire_leaves_everything_as_it_was() -> None:
    """F3: a request that does not fit holds nothing, not even for a moment after it was refused."""
    rig = Rig(HYBRID, device_pages=24, host_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    holder = rig.ready(text(2, 60))
    before = [rig.used(Tier.DEVICE, kind) for kind in CACHED_KINDS]
    with pytest.raises(NoRoom):
        rig.open([*prompt, *text(3, 30)])
    rig.cache.audit()
    assert all(rig.used(Tier.DEVICE, kind) <= count for kind, count in zip(CACHED_KINDS, before, strict=True))
    assert rig.restore(prompt) == 16 and not rig.pending(Purpose.LOAD)
    rig.cache.release(holder)
    rig.idle_check()


def test_commit_without_room_for_a_second_point_keeps_the_request_going() -> None:
    """F3: the state is only handed over when the request can get a copy; without space it stays the request's alone."""
    rig = Rig(FULL_POINT, device_pages=6)  # five prefix pages and one point
    lease = rig.ready(text(1, 17))
    mine = lease.point_pages.tolist()
    rig.compute(lease, 16)
    assert lease.ready and lease.point_pages.tolist() == mine
    assert rig.cache.counters["checkpoint_skipped_no_room"] == 1
    rig.compute(lease, 17)
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.cache.lookup(text(1, 17)).known_tokens == 16  # G2: pages are kept although no checkpoint could be made


@pytest.mark.parametrize("write", list(WritePolicy))
def test_every_page_below_is_reachable_from_the_root(write: WritePolicy) -> None:
    """G1: nothing hangs below a gap: each page of a path is in some tier, and so are all pages before it."""
    rig = Rig(HYBRID, device_pages=40, host_pages=24, write=write)
    for turn in range(12):
        rig.serve([*text(1, 8), *text(turn % 5, 4 * (turn % 4) + 3)])
        for node in rig.tree.nodes():
            if node.parent is not None:
                held = [run.ids != ABSENT for run in node.runs if run is not None]
                assert held and all(sum(page) >= 1 for page in zip(*held, strict=True))


def test_branch_inside_a_chunk_gets_a_checkpoint_of_its_own() -> None:
    """G3: where a prompt leaves a known path it leaves a checkpoint, so the third request resumes at the branch."""
    rig = Rig(HYBRID)
    trunk = text(1, 16)
    rig.serve([*trunk, *text(2, 17)])
    second = rig.ready([*trunk, *text(3, 17)])
    assert second.resume == 0 and second.stops == (16, 32)
    rig.prefill(second)
    rig.cache.release(second)
    assert rig.serve([*trunk, *text(4, 17)]).device == 16


@pytest.mark.parametrize("spec", ["window", "point", "hybrid"])
def test_split_keeps_the_checkpoints_on_both_sides(spec: str) -> None:
    """G3: cutting a node moves its checkpoints to the part they stand in; none is lost."""
    rig = Rig(ALL_MODELS[spec], placement=PlacementConfig(interval_tokens=8))
    prompt = text(1, 33)
    rig.serve(prompt)
    rig.serve([*prompt[:20], *text(2, 5)])
    assert len(rig.cache.lookup(prompt).path) >= 2, "the node was not split"
    for boundary in (8, 16, 20, 24, 32):
        assert rig.restore(prompt[: boundary + 1]) == boundary
        rig.serve(prompt[: boundary + 1])


def test_long_session_resumes_at_the_end_of_its_last_turn() -> None:
    """G3: turn after turn, under pressure from others, a session in use never falls back to nothing."""
    rig = Rig(HYBRID, device_pages=150, placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=8))
    session: list[int] = text(1, 9)
    for turn in range(20):
        answer = text(50 + turn, 11)
        sources = rig.serve(session, answer=answer)
        assert turn == 0 or sources.computed <= 11 + 16, f"turn {turn}: {sources}"
        session = [*session, *answer]
        rig.serve(text(100 + turn, 33))
        rig.clock.advance(600)


def test_pressure_for_checkpoints_takes_little_of_the_prefix() -> None:
    """G4: many checkpoints that request space evict checkpoints, and at most a slab's worth of prefix pages a time."""
    big = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=4 * OBJECT_BYTES, dtype="u8")
    rig = Rig(model(KV, big), device_pages=256)
    rig.serve(text(1, 4 * 100 + 1))
    known = rig.cache.lookup(text(1, 401)).known_tokens
    for name in range(2, 40):
        rig.clock.advance(1)
        rig.serve(text(name, 5))
    assert known == 400 and rig.cache.counters["evicted_device_checkpoints"] > 0
    assert rig.cache.lookup(text(1, 401)).known_tokens >= 300


def test_a_checkpoint_alone_goes_and_its_prefix_stays() -> None:
    """G4: evicting a checkpoint from the device or the host removes that checkpoint and nothing else."""
    for tier in (Tier.DEVICE, Tier.HOST):
        rig = Rig(HYBRID, device_pages=64, host_pages=64)
        prompt = text(1, 17)
        rig.serve(prompt)
        pages = {each: rig.used(each, Kind.PREFIX) for each in (Tier.DEVICE, Tier.HOST)}
        while rig.used(tier, Kind.POINT):
            victim = rig.tree.ranking.pop(tier, runs=False, checkpoints=True)
            assert isinstance(victim, Residency)
            drop_residency(rig.tree, victim, rig.state.loss(LossReason.EVICTED, tier))
        rig.cache.audit()
        assert {each: rig.used(each, Kind.PREFIX) for each in (Tier.DEVICE, Tier.HOST)} == pages
        assert rig.restore(prompt) == 16  # the other tier still has one


@pytest.mark.parametrize("spec", ALL_MODELS)
@pytest.mark.parametrize("host_pages", [None, 64])
def test_every_mix_of_tiers_restores_every_shape(spec: str, host_pages: int | None) -> None:
    """G6: no kind of state needs a tier or a pool of its own to be found again."""
    rig = Rig(ALL_MODELS[spec], host_pages=host_pages)
    rig.serve(text(1, 17))
    assert rig.serve(text(1, 17)).device == 16


def test_pages_that_no_checkpoint_reaches_go_first() -> None:
    """G, policy: prefix pages behind the last checkpoint are worth nothing, however recent they are."""
    rig = Rig(FULL_WINDOW, device_pages=64)
    old = text(1, 17)
    rig.serve(old)
    rig.clock.advance(5000)
    lease = rig.ready(text(2, 17))
    rig.compute(lease, 15)  # leaves before its first stop: three pages, no checkpoint
    rig.cache.release(lease)
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 4 + 3
    rig.shrink(Tier.DEVICE, 3)
    assert rig.cache.lookup(text(2, 17)).known_tokens == 0
    assert rig.restore(old) == 16


def test_write_back_copies_before_it_drops_and_keeps_checkpoints() -> None:
    """G, policy: under write-back everything that leaves the device, checkpoints included, is on the host first."""
    rig = Rig(HYBRID, device_pages=40, host_pages=200, write=WritePolicy.EXCLUSIVE)
    prompts = [text(name, 17) for name in range(8)]
    for prompt in prompts:
        rig.serve(prompt)
    assert rig.used(Tier.HOST, Kind.POINT) and rig.used(Tier.HOST, Kind.WINDOW)
    assert [rig.restore(prompt) for prompt in prompts] == [16] * 8
    rig.evict_all(Tier.DEVICE)
    assert [rig.restore(prompt) for prompt in prompts] == [16] * 8
    assert rig.ready(prompts[0]).sources.host == 16
