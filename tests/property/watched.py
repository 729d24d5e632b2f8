"""One random cache with everything that watches it, and every check that an answer of the cache can be put to.

Asks only. The orders are in `world.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from feed_watch import FeedWatch
from header_watch import HeaderWatch
from ledger import TOKEN, Content, Ledger, LedgerExecutor, space_of
from oracle import Oracle, boundaries, has_rows_on_device, justified, needs_checkpoint, page_tiers, window_contents
from quota_watch import QuotaWatch
from toy_models import Regime, Setup

from stepwell import Cause, Kind, Match, Namespace, Tier, build_cache
from stepwell.base.meters import ManualClock
from stepwell.base.tasks import PageIds
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.testing import DigestEngine
from stepwell.transfer.copy_engine import NumpyCopyEngine
from stepwell.tree import tree

MATCH_FIELDS = (
    "prompt_tokens", "known_tokens", "arrived_tokens", "restore_tokens", "device_tokens", "host_tokens", "checkpoint", "version",
)  # fmt: skip


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


class Watched:
    """A cache under test: a ledger of contents, an oracle of facts, a model of digests."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.spec, self.regime = setup, setup.spec, setup.regime
        tree.NODE_PAGES = setup.node_pages
        layouts = layouts_for(setup.spec, setup.config, alignment=setup.tuning.page_alignment_bytes)
        self.memories = [self._memories(layouts) for _ in range(setup.ranks)]
        self.ledger = self._ledger()
        self.oracle = Oracle(setup.spec, setup.placement)
        self.executor = LedgerExecutor([NumpyCopyEngine(memories) for memories in self.memories], self.ledger)
        self.engine = DigestEngine(setup.spec, [self._seen_by_engine(memories) for memories in self.memories])
        self.clock = ManualClock()
        self.cache = build_cache(
            setup.spec, setup.config, executor=self.executor, clock=self.clock, on_free=self._on_free, model=setup.spec.name,
            tuning=setup.tuning,
        )  # fmt: skip
        self.reader = DigestEngine(setup.spec, self.memories)  # of the cache's own memory, as another server would read it
        self.engine.row_pages = self.reader.row_pages = rows = self.cache.row_pages
        self.headers = HeaderWatch(setup.spec, self.memories, rows) if rows is not None else None
        self.quotas = QuotaWatch(self.cache)
        self.feed = FeedWatch(self.cache) if setup.ranks == 1 else None  # elsewhere keys may never be asked for
        self.nearest = Tier.DEVICE if Tier.DEVICE in layouts else Tier.HOST
        self.trace: list[str] = []  # every decision the cache makes, in order
        self.excuses = {Cause.FAILED} if setup.regime is Regime.FAULTY else set()  # reasons for a loss that this run has given
        self.stored: set[tuple[tuple[str | None, ...], bytes]] = set()  # first pages that were ever committed

    def _ledger(self) -> Ledger:
        return Ledger(self.spec)

    def _memories(self, layouts: dict) -> dict:
        return numpy_memories(self.spec, layouts)

    def _seen_by_engine(self, memories: dict) -> dict:
        return memories

    def _on_free(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        self.trace.append(f"free {tier.label} {kind.label} {ids.tolist()}")
        self.ledger.freed(tier, kind, ids)
        self.engine.poison(tier, kind, ids)

    # ---- questions --------------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether the oracle can foretell every answer now."""
        return self.regime.exact

    def look(self, tokens: Sequence[int], namespace: Namespace) -> Match:
        """A lookup, with everything that can be said about its answer."""
        match, again = (self.cache.lookup(tokens, namespace=namespace) for _ in range(2))
        for name in MATCH_FIELDS:
            assert getattr(match, name) == getattr(again, name), f"a second lookup sees another {name}"
        assert match.restore_tokens <= match.arrived_tokens <= match.known_tokens < match.prompt_tokens == len(tokens)
        assert match.device_tokens + match.host_tokens == match.restore_tokens, match
        path, space, page = packed(tokens), space_of(namespace), self.spec.page_tokens
        missing = justified(self.spec, self.ledger, space, path, match.restore_tokens)
        assert missing is None, f"{match}: {missing}"
        on_device = sum(
            Tier.DEVICE in page_tiers(self.spec, self.ledger, space, path, each)
            and has_rows_on_device(self.spec, self.ledger, space, path, each)
            for each in range(match.restore_tokens // page)
        )
        assert match.device_tokens <= on_device * page, f"{match}: only {on_device} of its pages are on the device"
        self._check_named_checkpoint(match, space, path)
        if not self.ledger.in_flight:
            assert match.arrived_tokens == match.known_tokens, f"{match}: no copy runs, yet {match.arrived_tokens} have arrived"
        if self.exact:
            expected, known = self.oracle.restore(space, path), self.oracle.known(space, path)
            assert self._as_foretold(match.known_tokens, range(known, known + 1)), f"{match}: {known} known tokens expected"
            assert self._as_foretold(match.restore_tokens, expected), f"{match}: {expected} expected"
        self._check_tiers(match)
        self._check_limited(tokens, namespace, limit=len(tokens) // 2)
        self._check_explanation(match, tokens, namespace)
        return match

    def _as_foretold(self, tokens: int, expected: range) -> bool:
        return tokens in expected

    def _check_tiers(self, match: Match) -> None:
        if self.regime is Regime.CALM and self.nearest is Tier.DEVICE:
            assert match.host_tokens == 0, f"{match}: the device never gave anything up"

    def _check_limited(self, tokens: Sequence[int], namespace: Namespace, *, limit: int) -> None:
        match = self.cache.lookup(tokens, namespace=namespace, limit_tokens=limit)
        missing = justified(self.spec, self.ledger, space_of(namespace), packed(tokens), match.restore_tokens)
        assert missing is None and match.restore_tokens <= limit, f"{match} within {limit}: {missing}"
        if self.exact:
            expected = self.oracle.restore(space_of(namespace), packed(tokens), limit=limit)
            assert self._as_foretold(match.restore_tokens, expected), f"{match} within {limit}: {expected} expected"

    def _check_named_checkpoint(self, match: Match, space: tuple[str | None, ...], path: bytes) -> None:
        """The very pages a match would resume from hold what belongs to its boundary, in each tier that has them all."""
        at = match.restore_tokens
        assert (match.checkpoint is not None) == (at > 0 and needs_checkpoint(self.spec, at)), match
        if match.checkpoint is None:
            return
        windows = window_contents(self.spec, space, path, match.restore_tokens)
        points = [Content(space, path[: match.restore_tokens * TOKEN])] if self.spec.parts(Kind.POINT) else []
        for residency in filter(None, (match.checkpoint.ready_in(tier) for tier in (Tier.DEVICE, Tier.HOST))):
            for kind, ids, contents in (
                (Kind.WINDOW, residency.windows, windows),
                (Kind.POINT, residency.points, points),
            ):
                for page, content in zip(ids.tolist(), contents, strict=True):
                    where = (residency.tier, kind, page)
                    assert self.ledger.holds(where, content), f"{match}: {where} does not hold what its checkpoint says"

    def _check_explanation(self, match: Match, tokens: Sequence[int], namespace: Namespace) -> None:
        why = self.cache.explain(tokens, namespace=namespace)
        seen = (why.prompt_tokens, why.known_tokens, why.arrived_tokens, why.restore_tokens)
        assert seen == (match.prompt_tokens, match.known_tokens, match.arrived_tokens, match.restore_tokens), why
        usable = max(boundaries(self.spec, len(tokens)), default=0)
        assert why.usable_tokens == usable and (why.cause is Cause.TOO_SHORT) == (usable == 0), why
        assert (why.cause is Cause.COMPLETE) == (match.restore_tokens == usable > 0), why
        assert str(match.restore_tokens) in str(why) and why.cause.value in str(why)
        assert why.cause in (Cause.COMPLETE, Cause.TOO_SHORT) or why.states, why
        first = packed(tokens[: self.spec.page_tokens])
        if why.cause is Cause.ARRIVING:
            assert self.ledger.in_flight, f"{why}, but no copy runs"
        elif why.cause is Cause.OTHER_NAMESPACE:
            mine = space_of(namespace)
            others = {space for space, page in self.stored if page == first and space[-2:] == mine[-2:]} - {mine}
            assert others and match.known_tokens == 0, why
        elif why.cause is Cause.OVER_QUOTA:
            assert namespace.tenant in self.setup.config.memory_quotas, why
            assert Cause.EVICTED in self.excuses or not self.regime.exact, why
        elif why.cause in (Cause.EVICTED, Cause.FAILED, Cause.EXPIRED, Cause.CLEARED):
            assert why.cause in self.excuses or (why.cause is Cause.EVICTED and not self.regime.exact), (
                f"{why}: nothing of the sort"
            )
