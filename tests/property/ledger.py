"""A shadow of every page's contents, kept from the outside: what was written, what was copied, what was freed.

Knows pages by (tier, kind, id) and contents by (namespace, tokens). It never asks the cache what it holds: the test reports
computed rows, the executor reports copies, and the arenas' `on_free` reports freed pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from stepwell import Kind, ModelSpec, Namespace, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Completion, PageIds, Plan
from stepwell.testing import ScriptedExecutor
from stepwell.transfer.copy_engine import CopyEngine

TOKEN = 4  # bytes of a packed token

Where: TypeAlias = tuple[Tier, Kind, int]


class Content(NamedTuple):
    """Bytes that belong to exactly these tokens of exactly this namespace (compared field by field, not by digest)."""

    space: tuple[str | None, ...]
    tokens: bytes


def space_of(namespace: Namespace) -> tuple[str | None, ...]:
    return (namespace.model, namespace.layout, namespace.shard, namespace.adapter, namespace.salt, namespace.tenant)


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan under way: what each target gets from which source, and every page that must not be freed or written meanwhile."""

    arrives: tuple[tuple[Where, Where, Content | None], ...]
    pages: tuple[Where, ...]


class Ledger:
    """What each page of each tier holds. `offered` prefix pages were committed; the others are still a request's own."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.contents: dict[Where, Content] = {}
        self._offered: set[Where] = set()
        self._flights: dict[Hashable, Flight] = {}  # copies by job
        self._busy: Counter[Where] = Counter()

    # ---- reports to it ----------------------------------------------------------------------------

    def computed(
        self, tier: Tier, space: tuple[str | None, ...], tokens: bytes, start: int, *,
        prefix: Sequence[int], windows: Sequence[int], first_window: int, points: Sequence[int], rows: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """A model has computed tokens from `start` to the end of `tokens` into these pages."""
        upto = len(tokens) // TOKEN
        for kind, size, pages, first in (
            (Kind.PREFIX, self._spec.page_tokens, prefix, 0),
            (Kind.ROWS, self._spec.page_tokens, rows, 0),
            (Kind.WINDOW, self._spec.window_page_tokens, windows, first_window),
        ):
            for index in range(max(start // size - first, 0), len(pages)):
                if (first + index) * size < upto:
                    assert pages[index] >= 0, f"page {index} was computed without a place for its rows"
                    held = tokens[: min((first + index + 1) * size, upto) * TOKEN]
                    self._write((tier, kind, int(pages[index])), Content(space, held))
        for page in points:
            self._write((tier, Kind.POINT, int(page)), Content(space, tokens))

    def offered(self, tier: Tier, prefix: Sequence[int]) -> None:
        """Whole prefix pages were committed: from now on they may be found."""
        self._offered.update((tier, Kind.PREFIX, int(page)) for page in prefix)

    def submitted(self, plan: Plan) -> None:
        arrives, pages, written = [], [], set()
        for copy in plan.copies:
            for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
                source, target = (copy.source.tier, copy.source.kind, read), (copy.target.tier, copy.target.kind, write)
                assert self._busy[target] == 0, f"two copies use {target} and one writes it"
                half = (*target, copy.source.kind)  # a host page is written in two parts where rows are pages of their own
                assert half not in written, f"one plan writes {target} twice"
                written.add(half)
                arrives.append((source, target, self.contents.get(source)))
                pages += [source, target]
        self._flights[plan.job] = Flight(tuple(arrives), tuple(pages))
        self._busy.update(pages)

    def given_up(self, job: JobId) -> None:
        """The cache no longer waits for a copy. What it brings counts for nothing, so an engine may change what it reads."""
        flight = self._flights[job]
        read = [source for source, _, _ in flight.arrives if source[0] is Tier.ENGINE]
        self._busy.subtract(read)
        arrives = tuple((source, target, None) for source, target, _ in flight.arrives)
        self._flights[job] = Flight(arrives, tuple((Counter(flight.pages) - Counter(read)).elements()))

    def delivered(self, completion: Completion) -> None:
        flight = self._flights.pop(completion.job)
        self._busy.subtract(flight.pages)
        arrived: dict[Where, Content | None] = {}
        for source, target, content in flight.arrives:
            assert arrived.setdefault(target, content) == content, f"{target} got rows of another page than the rest of it"
            if completion.error is None and content is not None:
                self.contents[target] = content
                if source in self._offered:  # not when its namespace was cleared meanwhile
                    self._offered.add(target)
            else:
                self.contents.pop(target, None)

    def cleared(self, space: tuple[str | None, ...]) -> None:
        """What was offered under a namespace can no longer be found, wherever its pages still are."""
        self._offered = {where for where in self._offered if where in self.contents and self.contents[where].space != space}

    def freed(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        for page in ids.tolist():
            where = (tier, kind, page)
            assert self._busy[where] == 0, f"{where} was freed while a copy uses it"
            self.contents.pop(where, None)
            self._offered.discard(where)

    def _write(self, where: Where, content: Content) -> None:
        assert self._busy[where] == 0, f"{where} was written while a copy uses it"
        self.contents[where] = content

    # ---- what it answers --------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)

    def rows_are_somewhere(self, content: Content) -> set[Tier]:
        """The tiers in which rows of exactly this page are, whatever refers to them."""
        places = {Tier.DEVICE: Kind.ROWS, Tier.HOST: Kind.PREFIX}
        held = {(where[0], where[1]) for where, each in self.contents.items() if each == content}
        return {tier for tier, kind in places.items() if (tier, kind) in held}

    def tiers_with(self, kind: Kind, content: Content) -> set[Tier]:
        """The tiers in which some page may be read that holds exactly this."""
        return {tier for tier in (Tier.DEVICE, Tier.HOST) if content in self._readable(tier, kind)}

    def holds(self, where: Where, content: Content) -> bool:
        return self.contents.get(where) == content

    def _readable(self, tier: Tier, kind: Kind) -> Iterator[Content]:
        for where, content in self.contents.items():
            if where[:2] == (tier, kind) and (kind is not Kind.PREFIX or where in self._offered):
                yield content


class LedgerExecutor(ScriptedExecutor):
    """Reports to the ledger when a plan starts, and when the cache hears how it ended."""

    def __init__(self, ranks: Sequence[CopyEngine], ledger: Ledger) -> None:
        super().__init__(ranks)
        self._ledger = ledger
        self._num_ranks = len(ranks)
        self.owed: dict[JobId, list[int]] = {}  # ranks that have not answered, by job

    def submit(self, plan: Plan) -> None:
        self._ledger.submitted(plan)
        self.owed[plan.job] = list(range(self._num_ranks))
        super().submit(plan)

    def answer(self, job: JobId, rank: int = 0, *, error: str | None = None) -> None:
        self.owed[job].remove(rank)
        if not self.owed[job]:
            del self.owed[job]
        super().answer(job, rank, error=error)

    def withdraw(self, job: JobId) -> bool:
        self._ledger.given_up(job)
        return super().withdraw(job)

    def answers(self) -> list[Completion]:
        done = super().answers()
        for completion in done:
            self._ledger.delivered(completion)
        return done
