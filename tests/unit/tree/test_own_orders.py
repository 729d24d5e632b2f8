"""The own orders of tenants with quotas: they drop what is gone even without a request, and keep up with what is used."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tree_bench import GONE, Bench

from stepwell import Kind, Namespace, Tier
from stepwell.base.tasks import PageIds, Span
from stepwell.tree.accounts import Account
from stepwell.tree.checkpoints import add_residency, drop_residency
from stepwell.tree.node import Residency, Run, Use, Victim
from stepwell.tree.own_orders import MOST_AT_LEAST, MOST_PER_LIVE, Orders
from stepwell.tree.pruning import clear, discard_ids, discard_suffix
from toys import FULL, HYBRID

ALICE = Namespace(model="m", layout="l", tenant="alice")
BOB = Namespace(model="m", layout="l", tenant="bob")
MANY = 200


def _bench(spec: object = FULL, quota: float = 1.0) -> tuple[Bench, Account, Orders]:
    bench = Bench(spec, pages=64 * MANY, quotas={"bob": quota})  # type: ignore[arg-type]
    account = bench.tree.accounts.limited["bob"]
    return bench, account, bench.tree.ranking.own[account, Tier.DEVICE]


def _insert(bench: Bench, count: int, space: Namespace = BOB, since: float = 0.0) -> list[PageIds]:
    return [bench.insert([i + 1], space=space, use=Use(at_s=since + i), release=True) for i in range(count)]


def _checkpoint(bench: Bench, name: int, page: int) -> Residency:
    ids = bench.insert([name] * page, space=BOB, use=Use(at_s=float(name)), release=True)
    held = bench.arena().alloc({Kind.WINDOW: len(HYBRID.window_span(page * 4)), Kind.POINT: 1})
    for kind, each in held.items():
        bench.arena().mark_ready(kind, each)
    node = bench.tree.owner[Tier.DEVICE][int(ids[-1])]
    residency = add_residency(
        bench.tree, node, page, Tier.DEVICE, windows=held[Kind.WINDOW], points=held[Kind.POINT], ready=True, now=0.0
    )  # fmt: skip
    bench.arena().release(Kind.WINDOW, held[Kind.WINDOW])
    assert residency is not None
    return residency


def _evict(bench: Bench) -> Victim | None:
    victim = bench.tree.ranking.pop(Tier.DEVICE, runs=True, checkpoints=True)
    if isinstance(victim, Run):
        discard_suffix(bench.tree, victim, 0, GONE)
    elif victim is not None:
        drop_residency(bench.tree, victim, GONE)
    return victim


def test_a_quiet_tenant_that_loses_all_in_the_common_order_leaves_no_entries() -> None:
    bench, account, own = _bench()
    _insert(bench, MANY)
    _insert(bench, 2 * MANY, ALICE, since=1000.0)
    for _ in range(MANY):
        _evict(bench)
    assert account.used_bytes == [0, 0] and len(own.runs) == 0
    bench.check()


def test_checkpoints_that_are_gone_leave_no_entries() -> None:
    bench, account, own = _bench(HYBRID)
    residencies = [_checkpoint(bench, 1 + i, 2) for i in range(MANY // 4)]
    assert len(own.checkpoints) == MANY // 4
    for left, residency in enumerate(reversed(residencies)):
        drop_residency(bench.tree, residency, GONE)
        assert len(own.checkpoints) <= MOST_PER_LIVE * (MANY // 4 - left - 1) + MOST_AT_LEAST
        bench.check()
    while _evict(bench) is not None:
        bench.check()
    assert account.used_bytes == [0, 0] and len(own.runs) == len(own.checkpoints) == 0


DYING: dict[str, Callable[[list[PageIds]], None]] = {
    "oldest first": lambda pages: None,
    "newest first": lambda pages: pages.reverse(),
    "mixed": lambda pages: random.Random(7).shuffle(pages),
}


@pytest.mark.parametrize("dying", DYING)
def test_the_dead_are_never_many_more_than_the_living(dying: str) -> None:
    bench, account, own = _bench()
    pages = _insert(bench, MANY)
    DYING[dying](pages)
    for left, ids in enumerate(pages):
        discard_ids(bench.tree, Tier.DEVICE, ids, GONE)  # out of turn: they were not popped before
        assert len(own.runs) <= MOST_PER_LIVE * (MANY - left - 1) + MOST_AT_LEAST
        bench.check()
    assert account.used_bytes == [0, 0] and len(own.runs) == 0


def test_what_something_stands_on_leaves_no_entries_either() -> None:
    bench, account, own = _bench()
    for i in range(MANY):
        bench.insert([i + 1], space=BOB, use=Use(at_s=float(i)), release=True)
        bench.insert([i + 1, 7], space=BOB, use=Use(at_s=float(i)))  # in use
    for _ in range(MANY):
        bench.tree.ranking.tidy(Tier.DEVICE)
        assert len(own.runs) <= MOST_PER_LIVE * len(list(own.runs.live())) + MOST_AT_LEAST
    bench.check()
    clear(bench.tree, BOB.digest, GONE)
    assert account.used_bytes == [0, 0] and len(own.runs) == 0


@pytest.mark.parametrize("of", ["bob", None])
def test_no_pop_meets_a_backlog_of_what_was_used_since(of: str | None) -> None:
    bench, account, _ = _bench(quota=0.01)
    _insert(bench, MANY, ALICE)
    for name, ids in enumerate(_insert(bench, MANY, since=1000.0)):
        bench.tree.retain([Span(tier=Tier.DEVICE, kind=Kind.PREFIX, ids=ids)])
        bench.tree.owner[Tier.DEVICE][int(ids[0])].note_use(Use(at_s=2000.0 + name))
        bench.tree.release(Tier.DEVICE, Kind.PREFIX, ids)
    ranking, settled = bench.tree.ranking, []
    settle = ranking._settle

    def watched(entry: object) -> object:
        settled.append(entry)
        return settle(entry)  # type: ignore[arg-type]

    ranking._settle = watched  # type: ignore[method-assign, assignment]
    for _ in range(MANY // 2):
        settled.clear()
        assert ranking.pop(Tier.DEVICE, runs=True, checkpoints=True, of=account if of else None) is not None
        assert len(settled) <= 4


def test_who_has_nothing_queued_is_not_asked_until_it_has() -> None:
    bench, account, _ = _bench()
    ranking = bench.tree.ranking

    def having(*, runs: bool, checkpoints: bool) -> list[Account]:
        return list(ranking.own.having([account], Tier.DEVICE, runs=runs, checkpoints=checkpoints))

    ids = bench.insert([1], space=BOB)
    assert having(runs=True, checkpoints=True) == []
    bench.tree.release(Tier.DEVICE, Kind.PREFIX, ids)
    assert having(runs=True, checkpoints=False) == [account] and having(runs=False, checkpoints=True) == []
    run = ranking.pop(Tier.DEVICE, runs=True, checkpoints=True, of=account)
    assert isinstance(run, Run) and ranking.pop(Tier.DEVICE, runs=True, checkpoints=True, of=account) is None
    assert having(runs=True, checkpoints=True) == []
    ranking.queue_run(run)
    assert having(runs=True, checkpoints=True) == [account]


def test_the_audit_notices_an_entry_that_is_missing_and_one_too_many() -> None:
    bench, _, own = _bench()
    _insert(bench, 20)
    bench.check()
    head = own.runs.head()
    assert head is not None
    own.runs.sweep = lambda count=0: None  # type: ignore[method-assign]
    for _ in range(MOST_PER_LIVE * 20 + MOST_AT_LEAST):
        own.runs.push(*head, number=-1)
    with pytest.raises(AssertionError, match="entries for 20 victims"):
        bench.check()
    own.runs.clear()
    with pytest.raises(AssertionError, match="0 victims in its order of device, and 20 are queued"):
        bench.check()
