"""What must not grow, wait or repeat itself while a cache runs for long."""

from __future__ import annotations

from threading import Event

import numpy as np

from stepwell import ModelSpec, PlacementConfig, Point, StateSpec, Tier, Window, WritePolicy
from stepwell.base.ids import JobId, Kind
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.transfer.copy_engine import Work
from toys import FULL, FULL_POINT, HYBRID, KV, PAGE, Rig, text
from waiting import PATIENCE_S, wait_until

FIRST_PAGE = np.zeros(1, np.int32)


def test_a_prompt_used_a_thousand_times_has_one_entry_among_the_expiries() -> None:
    rig = Rig(FULL)
    for _ in range(1000):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(1, 17), ttl_s=60.0)
    assert len(rig.state.expiries) <= 2 * sum(1 for _ in rig.tree.nodes())
    rig.clock.advance(60.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 0
    rig.idle_check()


def test_the_order_of_eviction_stays_as_small_as_what_is_cached() -> None:
    rig = Rig(FULL_POINT, placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=PAGE))
    rig.serve(text(9, 17), priority=5)  # stays at the front of nothing, and must not shield what is behind it
    with rig.ready(text(1, 17)) as lease:
        rig.prefill(lease)
        for token in range(300):
            rig.clock.advance(1.0)
            rig.decode(lease, [token])
    checkpoints = sum(len(node.checkpoints or {}) for node in rig.tree.nodes())
    assert len(rig.tree.ranking._orders[Tier.DEVICE].checkpoints) <= 4 * checkpoints + 8
    rig.idle_check()


def test_a_token_that_fills_no_page_leaves_the_tree_alone() -> None:
    rig = Rig(HYBRID)
    with rig.ready(text(1, 17)) as lease:
        rig.prefill(lease)
        version = rig.tree.version
        rig.decode(lease, [1, 2])
        assert rig.tree.version == version and lease.num_tokens == 19
        rig.decode(lease, [3])  # the 20th token fills the fifth page
        assert rig.tree.version > version
    rig.idle_check()


def test_an_optional_window_that_is_missing_does_not_stop_a_restore() -> None:
    draft = StateSpec(name="draft", shape=Window(tokens=8), layers=1, row_bytes=8, dtype="u8", required=False)
    rig = Rig(ModelSpec(name="toy", page_tokens=PAGE, states=(KV, draft)))
    rig.serve(text(1, 17))
    with rig.ready(text(1, 17)) as lease:
        assert lease.resume == 16
        assert lease.first_window * PAGE == 16  # and the lease says that the window starts empty
    rig.idle_check()


def test_a_request_that_resumed_without_its_optional_window_can_leave_a_checkpoint() -> None:
    draft = StateSpec(name="draft", shape=Window(tokens=8), layers=1, row_bytes=8, dtype="u8", required=False)
    buffer = StateSpec(name="buffer", shape=Point(period=2 * PAGE), layers=1, row_bytes=8, dtype="u8")
    rig = Rig(ModelSpec(name="toy", page_tokens=PAGE, states=(KV, draft, buffer)))
    rig.serve(text(1, 17))
    assert rig.restore(text(1, 21)) == 16  # a multiple of the period: no state has bytes of its own there
    rig.serve(text(1, 21))  # resumes at 16 with an empty window, and leaves a checkpoint at 20
    with rig.ready(text(1, 21)) as lease:
        assert lease.resume == 20 and lease.restored is not None
    rig.idle_check()


def test_a_pinned_checkpoint_outlives_the_trail_it_was_part_of() -> None:
    rig = Rig(FULL_POINT, placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=2 * PAGE))
    with rig.ready(text(1, 9)) as lease:
        rig.prefill(lease)
        rig.decode(lease, range(7))
        pin = rig.cache.pins.add([*text(1, 9), *range(7), 7])
        assert pin.tokens == 16
        rig.decode(lease, range(7, 24))
    with pin:
        assert rig.restore([*text(1, 9), *range(7), 7]) == 16
    rig.idle_check()


def test_write_back_tries_again_once_the_host_has_room() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=8, write=WritePolicy.EXCLUSIVE)
    rig.serve(text(1, 33))
    rig.evict_all(Tier.HOST)
    blocker = rig.state.arena(Tier.HOST).alloc({Kind.PREFIX: 8})[Kind.PREFIX]
    rig.serve_without_audit(text(2, 33))  # the first prompt loses pages that had nowhere to go
    rig.state.arena(Tier.HOST).release(Kind.PREFIX, blocker)
    left = rig.restore(text(1, 33))
    rig.serve(text(3, 33))
    assert rig.restore(text(1, 33)) == left > 0
    rig.idle_check()


class SlowSaves:
    """A copy engine whose saves wait until the test releases them."""

    def __init__(self) -> None:
        self.gate = Event()

    def begin(self, plan: Plan) -> Work:
        return (lambda: self._wait()) if plan.purpose is Purpose.SAVE else (lambda: None)

    def _wait(self) -> None:
        assert self.gate.wait(PATIENCE_S)


def test_what_a_request_waits_for_is_not_held_up_by_saves() -> None:
    copy_engine = SlowSaves()
    executor = ThreadCopyExecutor([copy_engine])
    span = Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=FIRST_PAGE)
    for number in range(20):
        executor.submit(Plan(job=JobId(number), purpose=Purpose.SAVE, copies=(Copy(source=span, target=span),)))
    executor.submit(Plan(job=JobId(99), purpose=Purpose.FORK, copies=(Copy(source=span, target=span),)))
    done = wait_until(executor.answers)
    assert [completion.job for completion in done] == [JobId(99)]
    copy_engine.gate.set()
    executor.drain(60)
    executor.close()
    assert len(executor.answers()) == 20
