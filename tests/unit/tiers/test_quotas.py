"""Quotas of memory: a tenant with more than its own loses first, and no tenant is refused or robbed for it.

A device of 32 pages; alice may have 8 of them. Everything in it is worth the same, but for when it was used last.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import CacheConfig, Cause, ConfigError, Kind, Lease, Namespace, Tier, WritePolicy
from stepwell.sim.policies import LeastRecent
from stepwell.tiers.eviction import make_room
from stepwell.tree.accounts import Account
from stepwell.tree.node import Victim
from toys import FULL, HYBRID, OBJECT_BYTES, SMALL_PAGES, SPILLING, Rig, text

PAGES, QUOTA = 32, 8
ALICE, BOB, NOBODY = "alice", "bob", None
OLDEST_FIRST = replace(SMALL_PAGES, eviction=LeastRecent())


class Shared(Rig):
    """A cache that tenants share. Each prompt is one second later than the one before."""

    def space(self, tenant: str | None, salt: str | None = None) -> Namespace:
        return self.cache.namespace_for(tenant=tenant, salt=salt)

    def open_as(self, tenant: str | None, name: int, pages: int, salt: str | None = None) -> Lease:
        self.clock.advance(1)
        lease = self.cache.acquire(self.cache.lookup(text(name, 4 * pages + 1), namespace=self.space(tenant, salt)))
        self.settle()
        self.prefill(lease)
        return lease

    def keep(self, tenant: str | None, name: int, pages: int, salt: str | None = None) -> None:
        self.cache.release(self.open_as(tenant, name, pages, salt))
        self.settle()
        self.cache.audit()

    def has(self, tenant: str | None, name: int, pages: int, salt: str | None = None) -> int:
        """How many pages of that prompt are cached."""
        return self.cache.lookup(text(name, 4 * pages + 1), namespace=self.space(tenant, salt)).known_tokens // 4

    def used_by(self, tenant: str, tier: Tier = Tier.DEVICE) -> int:
        return self.cache.tenants()[tenant][tier].used_bytes // OBJECT_BYTES

    def want(self, pages: int, tenant: str | None = None, tier: Tier = Tier.DEVICE) -> None:
        """Requests space for `pages` pages more than are free."""
        free = PAGES - sum(self.used(tier, kind) for kind in self.state.arena(tier).layout.strides)
        assert make_room(self.state, tier, {Kind.PREFIX: free + pages}, tenant=tenant).fits
        self.cache.audit()


def shared(**settings: object) -> Shared:
    quotas = {ALICE: QUOTA / PAGES}
    return Shared(FULL, device_pages=PAGES, tuning=OLDEST_FIRST, memory_quotas=quotas, **settings)  # type: ignore[arg-type]


def test_whoever_is_over_its_quota_loses_first_whoever_needs_the_room() -> None:
    rig = shared()
    rig.keep(BOB, 1, 10)  # the oldest
    rig.keep(NOBODY, 2, 4)
    rig.keep(ALICE, 3, 12)
    rig.want(3)
    assert (rig.has(BOB, 1, 10), rig.has(NOBODY, 2, 4), rig.has(ALICE, 3, 12)) == (10, 4, 9)
    assert rig.cache.explain(text(3, 49), namespace=rig.space(ALICE), store_wait_s=0).cause is Cause.OVER_QUOTA
    assert rig.cache.counters["over_quota_device_pages"] == 3


def test_no_more_is_lost_for_a_quota_than_there_is_beyond_it() -> None:
    rig = shared()
    rig.keep(BOB, 1, 10)
    rig.keep(ALICE, 2, 10)  # two too many
    rig.want(5)
    assert (rig.has(BOB, 1, 10), rig.has(ALICE, 2, 10)) == (7, 8)
    assert rig.cache.explain(text(1, 41), namespace=rig.space(BOB), store_wait_s=0).cause is Cause.EVICTED


def test_of_what_a_tenant_has_the_least_valuable_goes_over_all_its_salts() -> None:
    rig = shared()
    rig.keep(ALICE, 1, 4)
    rig.keep(ALICE, 2, 4, salt="s")
    rig.keep(ALICE, 1, 4)  # used again
    rig.keep(ALICE, 3, 4)
    rig.want(2)
    assert [rig.has(ALICE, 1, 4), rig.has(ALICE, 2, 4, salt="s"), rig.has(ALICE, 3, 4)] == [4, 2, 4]


def test_while_there_is_room_nobody_loses_anything() -> None:
    rig = shared()
    rig.keep(ALICE, 1, 24)
    assert rig.has(ALICE, 1, 24) == 24 and rig.used_by(ALICE) == 24


def test_a_tenant_at_its_quota_makes_room_for_itself_out_of_its_own() -> None:
    rig = shared()
    rig.keep(BOB, 1, 22)  # the oldest
    rig.keep(ALICE, 2, QUOTA)
    rig.keep(ALICE, 3, 4)
    assert rig.has(BOB, 1, 22) == 22, "alice was not over her quota before, and would have been with what she asked for"
    assert (rig.has(ALICE, 2, QUOTA), rig.has(ALICE, 3, 4)) == (5, 4)


def test_a_request_larger_than_its_quota_runs_and_takes_what_is_idle() -> None:
    rig = shared()
    rig.keep(BOB, 1, 20)
    with rig.open_as(ALICE, 2, 20) as lease:
        assert lease.ready and rig.used_by(ALICE) == 20 > QUOTA
        rig.want(1)
        assert rig.has(ALICE, 2, 20) == 20, "what runs is not evicted"
        rig.cache.audit()
    bobs = rig.has(BOB, 1, 20)
    rig.keep(BOB, 3, 10)
    assert rig.has(BOB, 1, 20) == bobs and rig.has(ALICE, 2, 20) < 12, "now it is idle, and goes first"


def test_who_is_over_its_quota_with_nothing_idle_is_not_asked_for_every_victim() -> None:
    rig = shared()
    rig.keep(BOB, 1, 4)
    rig.keep(BOB, 2, 4)
    rig.keep(NOBODY, 3, 4)
    ranking, asked = rig.state.tree.ranking, []
    pop = ranking.pop

    def watched(tier: Tier, *, runs: bool, checkpoints: bool, of: Account | None = None) -> Victim | None:
        asked.append(of.tenant if of is not None else None)
        return pop(tier, runs=runs, checkpoints=checkpoints, of=of)

    with rig.open_as(ALICE, 4, 12):
        ranking.pop = watched  # type: ignore[method-assign]
        rig.want(10)
        assert asked.count(ALICE) <= 1 and asked.count(None) >= 3
    asked.clear()
    rig.want(1)
    assert asked == [ALICE], "now she has something"


def test_what_is_pinned_counts_and_stays() -> None:
    rig = shared()
    rig.keep(BOB, 3, 12)  # the oldest
    rig.keep(ALICE, 1, 6)
    pin = rig.cache.pins.add(text(1, 25), namespace=rig.space(ALICE))
    rig.keep(ALICE, 2, 6)
    rig.want(6)
    assert (rig.has(BOB, 3, 12), rig.has(ALICE, 1, 6), rig.has(ALICE, 2, 6)) == (10, 6, 2), "four were beyond the quota"
    rig.want(10 + 2)
    assert (rig.has(BOB, 3, 12), rig.has(ALICE, 1, 6), rig.has(ALICE, 2, 6)) == (0, 6, 0)
    rig.cache.pins.release(pin)


def test_shared_windows_and_points_are_counted_once_and_given_back() -> None:
    quotas = {ALICE: 0.25, BOB: 0.25}
    rig = Shared(HYBRID, device_pages=96, host_pages=96, tuning=OLDEST_FIRST, memory_quotas=quotas)
    for round_ in range(3):
        for name, tenant in enumerate((ALICE, BOB, NOBODY)):
            rig.keep(tenant, 10 * round_ + name, 6)
            rig.keep(tenant, 10 * round_ + name, 7)
    found = rig.cache.tenants()
    assert set(found) == {ALICE, BOB} and all(found[who][tier].used_bytes > 0 for who in found for tier in found[who])
    assert found[ALICE][Tier.HOST].quota_bytes == 96 * OBJECT_BYTES // 4
    rig.cache.flush()
    assert all(sizes.used_bytes == 0 for tiers in rig.cache.tenants().values() for sizes in tiers.values())


@pytest.mark.parametrize("write", list(WritePolicy))
def test_a_quota_holds_in_the_host_tier_too(write: WritePolicy) -> None:
    rig = shared(host_pages=PAGES, write=write)
    rig.keep(BOB, 1, 12)
    rig.keep(BOB, 1, 12)  # so that it is saved under any policy
    rig.evict_all(Tier.DEVICE)
    for name in range(2, 6):
        rig.keep(ALICE, name, 12)
        rig.keep(ALICE, name, 12)
        rig.evict_all(Tier.DEVICE)
    assert rig.has(BOB, 1, 12) == 12, "alice made space out of her own"
    assert 0 < rig.used_by(ALICE, Tier.HOST) <= 20


def test_rows_that_spill_are_counted_where_they_are() -> None:
    rig = Shared(SPILLING, device_pages=120, host_pages=256, hot_rows=4, memory_quotas={ALICE: 0.5})
    first, second = rig.open_as(ALICE, 1, 14), rig.open_as(ALICE, 2, 14)
    assert rig.state.row_pages is not None
    with first, second:
        before = rig.used_by(ALICE)
        make_room(rig.state, Tier.DEVICE, {Kind.ROWS: 30})
        assert rig.state.row_pages.num_backed > 0 and rig.used_by(ALICE) < before
        rig.cache.audit()
    rig.settle()
    rig.cache.audit()


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_quota_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="memory quota of alice"):
        CacheConfig(device_bytes=1 << 20, memory_quotas={ALICE: share})
