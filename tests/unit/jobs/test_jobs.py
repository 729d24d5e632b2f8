"""Jobs end once each, whatever becomes of one of them."""

from __future__ import annotations

from functools import partial

import pytest

from stepwell import Kind, Tier
from stepwell.base.ids import JobId
from stepwell.base.prompt import Namespace
from stepwell.base.tasks import ItemStatus, PageIds, PutPages, Reply, Span, StoreOp
from stepwell.jobs.jobs import End, Jobs
from stepwell.jobs.wakeup import Wakeup
from stepwell.testing import ScriptedStoreExecutor
from toys import FULL, Rig

LIMIT_S = 30.0


class Few:
    """Three jobs, each with a host page of its own; what came of them is noted, and one of them raises when it ends."""

    def __init__(self, *, broken: int) -> None:
        self.rig = Rig(FULL, host_pages=16, device_pages=16)
        self.executor = ScriptedStoreExecutor(())
        self.jobs: Jobs[StoreOp, Reply] = Jobs(self.executor, self.rig.tree, self.rig.clock, Wakeup())
        self.ended: list[tuple[JobId, End]] = []
        self._broken = broken
        for _ in range(3):
            self._start()

    def _start(self) -> None:
        host = self.rig.state.arena(Tier.HOST)
        ids: PageIds = host.alloc({Kind.PREFIX: 1})[Kind.PREFIX]
        task = PutPages(parent=None, first=0, keys=(), ids=ids)
        op = StoreOp(job=self.jobs.next_id(), namespace=Namespace(model="toy", layout=""), task=task)
        pages = (Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=ids),)
        self.jobs.start(op, pages=pages, on_end=partial(self._hear, op.job))
        self.rig.tree.release_all(pages)  # the job has its own reference

    def _hear(self, job: JobId, end: End, answer: Reply | None) -> None:
        self.ended.append((job, end))
        if job == self._broken:
            raise ValueError(f"job {job}")

    def answer_all(self) -> None:
        for job in self.executor.pending:
            self.executor.finish(job, status=ItemStatus.OK)

    @property
    def used(self) -> int:
        return self.rig.used(Tier.HOST, Kind.PREFIX)


def test_an_answer_that_cannot_be_applied_takes_no_other_with_it() -> None:
    few = Few(broken=2)
    few.answer_all()
    with pytest.raises(ValueError, match="job 2"):
        few.jobs.apply()
    assert [answer.job for answer in few.jobs.apply()] == [1, 3], "reported by the next call"
    assert few.ended == [(1, End.ANSWERED), (2, End.ANSWERED), (3, End.ANSWERED)]
    assert not few.jobs.num_running and not few.used, "what it held is free"
    assert few.jobs.apply() == []


def test_what_is_taken_back_lets_its_pages_go_though_nobody_could_be_told() -> None:
    few = Few(broken=1)
    few.executor.gone = True
    with pytest.raises(ValueError, match="job 1"):
        few.jobs.withdraw_all()
    assert few.jobs.withdraw_all() == 2 and not few.used and not few.jobs.num_running


def test_those_that_are_overdue_are_given_up_on_though_one_could_not_be_told() -> None:
    few = Few(broken=1)
    few.rig.clock.advance(LIMIT_S)
    with pytest.raises(ValueError, match="job 1"):
        few.jobs.give_up_overdue(LIMIT_S)
    few.rig.clock.advance(LIMIT_S)
    assert few.jobs.give_up_overdue(LIMIT_S) == {2: End.OVERDUE, 3: End.OVERDUE}
    assert few.jobs.num_running == few.used == 3 and not few.jobs.num_awaited, "their pages are held until they are answered"
    few.answer_all()
    assert few.jobs.apply() == [] and not few.used
