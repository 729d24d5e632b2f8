"""A watched cache and the orders one can give it. Each goes to the cache and to its watchers.

`check` looks at everything that must hold between two orders. Used by the state machines and by the determinism test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from ledger import TOKEN, Content, Where, space_of
from oracle import boundaries, needs_checkpoint
from toy_models import Regime, Setup
from watched import Watched, packed

from stepwell import Cause, Kind, Lease, Match, Namespace, NoRoom, Point, Tier
from stepwell.base.ids import JobId
from stepwell.base.prompt import page_keys
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.cache.report import StepReport
from stepwell.store_tier.ticket import Ticket
from stepwell.testing.digest_engine import Pages
from stepwell.tiers.lifetime import Pin
from stepwell.tree.match import ids_of
from stepwell.tree.node import ABSENT


@dataclass(eq=False)
class Held:
    """A lease, and what the test knows of it by itself."""

    lease: Lease
    namespace: Namespace
    tokens: list[int]
    finished: bool = False  # said `last`: computes nothing more
    cleared: bool = False  # its namespace was cleared: what it computes is for itself alone
    point_copy: int | None = None  # the page to which its point state was copied, until that is committed

    @property
    def space(self) -> tuple[str | None, ...]:
        return space_of(self.namespace)


@dataclass(eq=False)
class Pinned:
    """A pin or a hand-out, and the pages that it named when it was made."""

    pin: Pin
    namespace: Namespace
    tokens: list[int]
    pages: list[tuple[Tier, Pages]]
    cleared: bool = False


class World(Watched):
    """A cache, its requests and its pins."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.held: list[Held] = []
        self.pinned: list[Pinned] = []

    # ---- a request's life -------------------------------------------------------------------------

    def acquire(
        self, tokens: Sequence[int], namespace: Namespace, *, match: Match | None = None, hints: tuple[int, ...] = (),
        priority: int = 0, ttl_s: float | None = None, ticket: Ticket | None = None,
    ) -> Held | None:  # fmt: skip
        """Leases a prompt, through a match of any age; None when there is no space."""
        fresh = self.look(tokens, namespace)
        try:
            lease = self.cache.acquire(match or fresh, hints=hints, priority=priority, ttl_s=ttl_s, ticket=ticket)
        except NoRoom as error:
            self._excuse(error)
            return None
        if ttl_s is not None:
            self.excuses.add(Cause.EXPIRED)
        held = Held(lease, namespace, list(tokens))
        self.held.append(held)
        self._check_opened(held, fresh, hints)
        self._check_sources(held, fresh, ticket)
        self.oracle.used(held.space, packed(tokens[: lease.resume]))
        self.trace.append(f"{lease} {lease.stops} {lease.sources} {self._pages(lease)}")
        return held

    def _excuse(self, error: NoRoom) -> None:
        assert self.regime is not Regime.CALM, f"no space in a calm run: {error}"
        self.trace.append(f"no space, waiting={error.waiting}")

    def _check_opened(self, held: Held, fresh: Match, hints: tuple[int, ...]) -> None:
        lease, legal = held.lease, boundaries(self.spec, len(held.tokens))
        assert lease.resume == lease.position == fresh.restore_tokens, f"{lease} resumes elsewhere than {fresh}"
        assert list(lease.stops) == sorted(set(lease.stops)), lease.stops
        assert all(stop in legal and stop > lease.resume for stop in lease.stops), f"{lease.stops} of {lease}"
        wanted = [at for at in legal if at in {hint - hint % self.oracle.step for hint in hints}]
        if self.setup.at_prompt_end and legal:
            wanted.append(legal[0])
        if self.setup.interval_pages:
            wanted += [at for at in legal if at % self.oracle.rounded(self.setup.placement.interval_tokens) == 0]
        needed = {at for at in wanted if at > lease.resume and needs_checkpoint(self.spec, at)}
        assert needed <= set(lease.stops), f"{lease.stops} lacks some of {wanted}"

    def _check_sources(self, held: Held, fresh: Match, ticket: Ticket | None) -> None:
        sources = held.lease.sources
        assert sources.device + sources.host + sources.store == fresh.restore_tokens, f"{sources} {fresh}"
        assert sources.device <= fresh.device_tokens and sources.host <= fresh.host_tokens, f"{sources} {fresh}"
        assert sources.store or (sources.device, sources.host) == (fresh.device_tokens, fresh.host_tokens), f"{sources} {fresh}"
        assert sources.computed == held.lease.prompt_tokens - held.lease.resume, sources
        assert ticket is not None or not sources.store, f"{sources} without a ticket"
        assert min(sources.device, sources.host, sources.store, sources.computed) >= 0, sources

    def advance(self, held: Held, upto: int, *, last: bool = False) -> bool:
        """Computes tokens up to `upto` and commits them; False when there is no space for them."""
        if not self._compute(held, upto):
            return False
        self.commit(held, upto, last=last)
        return True

    def _compute(self, held: Held, upto: int) -> bool:
        lease = held.lease
        try:
            self.cache.grow(lease, upto)
        except NoRoom as error:
            self._excuse(error)
            return False
        if self.headers is not None:
            self.headers.before_pass([each.lease for each in self.held])
        self.engine.compute(lease, upto)
        points = lease.point_pages.tolist()
        # Every other request has its state copied by the engine; now and then the pass that was to do it was cancelled.
        copy = self.cache.copy_point(lease, upto) if lease.id % 2 else None
        held.point_copy = copy if lease.id % 5 else None
        if held.point_copy is not None:
            self.engine.copy_point(lease, held.point_copy)
            points.append(held.point_copy)
        self.ledger.computed(
            Tier.DEVICE, held.space, packed(held.tokens[:upto]), lease.position,
            prefix=lease.prefix_pages.tolist(), windows=lease.window_pages.tolist(),
            first_window=lease.first_window, points=points, rows=self._row_pages(lease),
        )  # fmt: skip
        return True

    def commit(self, held: Held, upto: int, *, last: bool = False) -> None:
        """Offers what was computed; may be called again for the same tokens."""
        lease, page = held.lease, self.spec.page_tokens
        asked = self.oracle.asked(lease.stops, lease.prompt_tokens, upto, last=last) and not held.cleared
        if not held.cleared:
            self.ledger.offered(Tier.DEVICE, lease.prefix_pages[: upto // page].tolist())
        skipped = self.cache.counters["checkpoint_skipped_no_room"]
        copy, held.point_copy = held.point_copy, None
        assert self.cache.commit(lease, upto, last=last, point_copy=copy) is not held.cleared
        left = asked and self.cache.counters["checkpoint_skipped_no_room"] == skipped
        assert left or not asked or self.regime is not Regime.CALM, f"{lease} left no checkpoint in a calm run"
        held.finished = held.finished or last
        self.note_commit(held, upto, checkpoint=left)

    def note_commit(self, held: Held, upto: int, *, checkpoint: bool) -> None:
        lease = held.lease
        path = packed(held.tokens[:upto])
        if not held.cleared:
            self.stored.add((held.space, path[: self.spec.page_tokens * TOKEN]))
            quiet = not self.ledger.in_flight and not self.pinned
            self.oracle.committed(
                lease.id, held.space, path, prompt_tokens=lease.prompt_tokens, checkpoint=checkpoint, quiet=quiet
            )
        if upto > lease.prompt_tokens:
            self.excuses.add(Cause.EVICTED)  # an answer drops the checkpoints it leaves behind, under that name
        self.trace.append(f"{lease} next stop {self.cache.next_stop(lease)} {self._pages(lease)}")

    def append(self, held: Held, tokens: Sequence[int]) -> None:
        self.cache.append(held.lease, tokens)
        held.tokens += tokens

    def abandon(self, held: Held, upto: int) -> None:
        """A request that is aborted after it computed and before it committed."""
        self._compute(held, upto)
        self.release(held)

    def release(self, held: Held) -> None:
        self.held.remove(held)
        self.cache.release(held.lease)

    # ---- upkeep -----------------------------------------------------------------------------------

    def answer(self, job: JobId, rank: int, *, fail: bool = False) -> None:
        self.executor.answer(job, rank, error="fails on purpose" if fail else None)

    def step(self) -> StepReport:
        report = self.cache.step()
        assert report.running == len(self.executor.pending), report
        self.trace.append(f"step {replace(report, detached=())}, {len(report.detached)} detached")
        self.pinned = [each for each in self.pinned if each.pin.expires_at_s > self.clock.now()]
        if not self.ledger.in_flight:
            loading = [held.lease for held in self.held if not held.lease.ready and not held.lease.failed]
            assert not loading, f"no copy runs, yet {loading} wait for one"
        return report

    def settle(self) -> None:
        self.executor.finish_all()
        self.step()

    def pin(self, tokens: Sequence[int], namespace: Namespace, ttl_s: float | None) -> None:
        match = self.look(tokens, namespace)
        upto = match.restore_tokens // self.spec.page_tokens
        there = {tier: ids_of(match.path, tier, upto) for tier in self.cache._state.tree.tiers}
        pin = self.cache.pins.add(tokens, namespace=namespace, ttl_s=ttl_s)
        if ttl_s is not None:
            self.excuses.add(Cause.EXPIRED)
        assert pin.tokens == match.restore_tokens, f"{pin} {match}"
        of_checkpoint = (pin.residency.windows, pin.residency.points) if pin.residency is not None else (NO_PAGES, NO_PAGES)
        named = []
        for tier, ids in pin.pages:
            mine = np.where(np.isin(there[tier], ids), there[tier], ABSENT)
            is_there = pin.residency is not None and pin.residency.tier is tier
            named.append((tier, mine, *(of_checkpoint if is_there else (NO_PAGES, NO_PAGES))))
        self._note_pinned(pin, namespace, tokens, named)

    def hand_out(self, tokens: Sequence[int], namespace: Namespace, ttl_s: float) -> None:
        """What the host has of a prompt is given to another server, which reads it at any time until that ends."""
        match = self.look(tokens, namespace)
        out = self.cache.hand_out(tokens, namespace=namespace, ttl_s=ttl_s)
        if out is not None:
            assert out.tokens == out.pin.tokens == match.restore_tokens, f"{out} {match}"
            path, page_bytes = packed(tokens[: out.tokens]), self.spec.page_tokens * TOKEN
            assert out.pages.keys == tuple(page_keys(namespace.digest, path, page_bytes))
            last = (out.checkpoint.windows, out.checkpoint.points) if out.checkpoint is not None else (NO_PAGES, NO_PAGES)
            self._note_pinned(out.pin, namespace, tokens, [(Tier.HOST, out.pages.ids, *last)])

    def _note_pinned(
        self, pin: Pin, namespace: Namespace, tokens: Sequence[int], named: list[tuple[Tier, PageIds, PageIds, PageIds]]
    ) -> None:  # fmt: skip
        path, first = packed(tokens[: pin.tokens]), self.spec.window_span(pin.tokens).start
        pages = [(tier, Pages(namespace, path, prefix, windows, first, points)) for tier, prefix, windows, points in named]
        self.pinned.append(Pinned(pin, namespace, list(tokens), pages))

    def unpin(self, pinned: Pinned) -> None:
        self.pinned.remove(pinned)
        self.cache.pins.release(pinned.pin)

    def flush(self, namespace: Namespace | None) -> None:
        self.excuses.add(Cause.CLEARED)
        self.cache.flush(namespace=namespace)
        for space in {space_of(each) for each in self.setup.spaces if namespace in (None, each)}:
            self.oracle.cleared(space)
        for pinned in self.pinned:
            pinned.cleared = pinned.cleared or namespace in (None, pinned.namespace)

    def clear(self, namespace: Namespace) -> None:
        self.excuses.add(Cause.CLEARED)
        self.cache.clear(namespace=namespace)
        self.oracle.cleared(space_of(namespace))
        self.ledger.cleared(space_of(namespace))
        for each in (*self.pinned, *self.held):
            each.cleared = each.cleared or each.namespace == namespace

    # ---- what must always hold --------------------------------------------------------------------

    def check(self) -> None:
        self.cache.audit()
        if self.feed is not None:
            self.feed.check()
        for held in self.held:
            assert held.lease.sources.total == held.lease.prompt_tokens, f"{held.lease.sources} {held.lease}"
            if held.lease.ready:
                self.check_lease(held)
        for pinned in self.pinned:
            for tier, pages in pinned.pages if pinned.pin.held else ():
                self.reader.check_pages(pages, tier, pinned.pin.tokens)
        for tier, budget in ((Tier.DEVICE, self.setup.config.device_bytes), (Tier.HOST, self.setup.config.host_bytes)):
            assert self.cache.stats().tier(tier).used_bytes <= (budget or 0), f"{tier.label} is over its budget"
        if self.regime is not Regime.FAULTY:
            for pinned in self.pinned:
                found = self.look(pinned.tokens, pinned.namespace).restore_tokens
                assert pinned.cleared or found >= pinned.pin.tokens, f"{pinned.pin} was promised, {found} are left"

    def check_lease(self, held: Held) -> None:
        """Ledger and bytes agree that every page a request may read is its own path's."""
        lease = held.lease
        self._check_pages(Tier.DEVICE, held, lease.position, lease.prefix_pages.tolist(), lease.point_pages.tolist())
        self.engine.check(lease)

    def _check_pages(self, tier: Tier, held: Held, position: int, prefix: list[int], points: list[int]) -> None:
        page, path = self.spec.page_tokens, packed(held.tokens)
        for index in range(position // page):
            content = Content(held.space, path[: (index + 1) * page * TOKEN])
            for where in ((tier, Kind.PREFIX, prefix[index]), *self._rows_at(prefix[index])):
                assert self.ledger.holds(where, content), f"{held.lease}: {where}"
        rows = any(isinstance(state.shape, Point) and state.shape.rows_at(position) for state in self.spec.states)
        for where in ((tier, Kind.POINT, point) for point in points if position and rows):
            assert self.ledger.holds(where, Content(held.space, path[: position * TOKEN])), f"{held.lease}: {where}"

    def _row_pages(self, lease: Lease) -> list[int]:
        """The ROWS page of each of its pages, where there are such; -1 for pages without."""
        pages = self.cache.row_pages
        return pages.rows[lease.prefix_pages].tolist() if pages is not None else []

    def _rows_at(self, page: int) -> list[Where]:
        """Where the rows of a device page are, if they may spill: exactly one place."""
        pages = self.cache.row_pages
        if pages is None:
            return []
        places = [(Tier.DEVICE, Kind.ROWS, int(pages.rows[page])), (Tier.HOST, Kind.PREFIX, int(pages.host[page]))]
        found = [where for where in places if where[2] >= 0]
        assert len(found) == 1, f"page {page} has its rows in {found}"
        return found

    @staticmethod
    def _pages(lease: Lease) -> list[list[int]]:
        return [lease.prefix_pages.tolist(), lease.window_pages.tolist(), lease.point_pages.tolist()]

    def close(self) -> None:
        """Releases everything, and proves that nothing is left behind."""
        for held in list(self.held):
            self.release(held)
        for pinned in list(self.pinned):
            self.unpin(pinned)
        self.settle()
        self.settle()
        self.check()
        assert not self.ledger.in_flight
        for namespace in self.setup.spaces:
            self.clear(namespace)
        self.cache.audit()
        for tier in (Tier.DEVICE, Tier.HOST):
            assert self.cache.stats().tier(tier).used_bytes == 0, (
                f"{self.cache.stats().tier(tier).used_bytes} bytes of the {tier.label} leaked"
            )
        left = [where for where in self.ledger.contents if where[0] is not Tier.ENGINE]
        assert not left, f"pages with contents were never freed: {left}"
