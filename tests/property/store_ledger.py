"""A ledger that also knows what operations to a store do: which host pages they read and write, and what each key stands for.

Compares every page that comes back with all that was ever offered under its name, before any request can read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from ledger import TOKEN, Content, Flight, Ledger, Where, space_of
from oracle import window_contents
from shelf import Shelf

from stepwell import Kind, ModelSpec, Namespace, Tier
from stepwell.base.ids import JobId
from stepwell.base.meters import Clock
from stepwell.base.prompt import page_keys
from stepwell.base.tasks import (
    FetchCheckpoint,
    FetchPages,
    FindItems,
    ItemStatus,
    Outcome,
    PutCheckpoint,
    PutPages,
    Relevel,
    Reply,
    StoreOp,
    num_items,
)
from stepwell.testing import ScriptedStoreExecutor
from stepwell.transfer.store_worker import StoreWorker


@dataclass(eq=False)
class _Sent:
    """An operation under way: for each of its items, the pages it moves and what they hold, or will."""

    op: StoreOp
    items: list[list[tuple[Where, Content]]]
    after: int  # how many pages had arrived when it was sent
    forgotten: bool = False  # its namespace was cleared: what it brings must not be found
    abandoned: bool = False  # the cache has given up on it: what it brings does not count


class StoreLedger(Ledger):
    """What each page of each tier holds, with a store below."""

    def __init__(self, spec: ModelSpec, shelf: Shelf, memories: Sequence[Any]) -> None:
        super().__init__(spec)
        self._shelf = shelf
        self._memories = memories  # of each rank
        self._sent: dict[tuple[LedgerStoreExecutor, JobId], _Sent] = {}
        self.meanings: dict[bytes, Content] = {}  # of page keys, reported by each request for a prompt
        self.barred: set[tuple[str | None, ...]] = set()  # namespaces that were cleared
        self.last_arrival: dict[bytes, int] = {}  # of page keys, by how many had arrived then
        self.num_arrivals = 0
        self.statuses: Counter[ItemStatus] = Counter()  # of what was to be fetched
        self.lines: list[str] = []  # everything that was sent, for traces

    # ---- reports to it ----------------------------------------------------------------------------

    def learn(self, namespace: Namespace, tokens: bytes) -> None:
        """Works out which key stands for which page of a prompt."""
        size = self._spec.page_tokens * TOKEN
        for index, key in enumerate(page_keys(namespace.digest, tokens, size)):
            self.meanings[key] = Content(space_of(namespace), tokens[: (index + 1) * size])

    def sent(self, store_executor: LedgerStoreExecutor, op: StoreOp) -> None:
        assert space_of(op.namespace) not in self.barred, f"{op.task} after its namespace was cleared"
        items = self._items(op)
        pages = [where for item in items for where, _ in item]
        for item in items:
            for where, content in item:
                if isinstance(op.task, (FetchPages, FetchCheckpoint)):
                    assert self._busy[where] == 0, f"an operation writes {where} while it is in use"
                else:
                    assert self.holds(where, content), f"{where} is stored as {content} and holds something else"
                    self._offer(where, content)
        assert len(set(pages)) == len(pages), f"one operation names a page twice: {pages}"
        self._sent[store_executor, op.job] = _Sent(op, items, self.num_arrivals)
        self._flights[store_executor, op.job] = Flight((), tuple(pages))
        self._busy.update(pages)
        self.lines.append(f"operation {op.job} {type(op.task).__name__} {pages}")

    def came(self, store_executor: LedgerStoreExecutor, reply: Reply) -> None:
        """The cache gets an answer."""
        sent = self._sent.pop((store_executor, reply.job))
        self._busy.subtract(self._flights.pop((store_executor, reply.job)).pages)
        self.lines.append(f"reply {reply.job} {[status.name for status in reply.outcome.statuses]}")
        if not isinstance(sent.op.task, (FetchPages, FetchCheckpoint)):
            return
        self.statuses.update(reply.outcome.statuses if not sent.abandoned else (ItemStatus.FAILED,))
        for index, (item, status) in enumerate(zip(sent.items, reply.outcome.statuses, strict=True)):
            good = status is ItemStatus.OK
            for where, content in item:
                if good:
                    self._check_bytes(where, content)
                if good and not sent.abandoned:
                    self.contents[where] = content
                else:
                    self.contents.pop(where, None)
                if good and where[1] is Kind.PREFIX and not sent.forgotten and not sent.abandoned:
                    self._offered.add(where)
            if good and isinstance(sent.op.task, FetchPages) and not sent.abandoned:
                self.num_arrivals += 1
                self.last_arrival[sent.op.task.keys[index]] = self.num_arrivals

    def abandoned(self, store_executor: LedgerStoreExecutor, job: JobId) -> None:
        if not self._sent[store_executor, job].abandoned:
            self._sent[store_executor, job].abandoned = True
            self.statuses[ItemStatus.FAILED] += 1

    def cleared(self, space: tuple[str | None, ...]) -> None:
        super().cleared(space)
        self.barred.add(space)
        for sent in self._sent.values():
            sent.forgotten = sent.forgotten or space_of(sent.op.namespace) == space

    # ---- what it answers --------------------------------------------------------------------------

    @property
    def num_arrivals_before_fetches(self) -> int:
        """How many pages had arrived before anything was sent for that is still on its way."""
        fetches = [sent.after for sent in self._sent.values() if isinstance(sent.op.task, (FetchPages, FetchCheckpoint))]
        return min([*fetches, self.num_arrivals])

    # ---- inside -----------------------------------------------------------------------------------

    def _items(self, op: StoreOp) -> list[list[tuple[Where, Content]]]:
        task = op.task
        if isinstance(task, (FindItems, Relevel)):
            return []
        if isinstance(task, (FetchPages, PutPages)):
            contents = [self.meanings[key] for key in task.keys]
            if isinstance(task, PutPages):
                self._check_chain(task, contents)
            return [[((Tier.HOST, Kind.PREFIX, page), each)] for page, each in zip(task.ids.tolist(), contents, strict=True)]
        assert isinstance(task, (FetchCheckpoint, PutCheckpoint))
        space, tokens = here = self.meanings[task.boundary]
        windows = window_contents(self._spec, space, tokens, len(tokens) // TOKEN)
        members = [((Tier.HOST, Kind.WINDOW, page), each) for page, each in zip(task.windows.tolist(), windows, strict=True)]
        return [[*members, *(((Tier.HOST, Kind.POINT, page), here) for page in task.points.tolist())]]

    def _check_chain(self, task: PutPages, contents: list[Content]) -> None:
        """Every page is offered as the child of the page before it."""
        size = self._spec.page_tokens * TOKEN
        before = [len(self.meanings[task.parent].tokens) if task.parent else 0, *(len(each.tokens) for each in contents)]
        assert before[0] == task.first * size, f"page {task.first} stands on {before[0] // size} pages"
        assert all(after - start == size for start, after in pairwise(before)), f"gaps in {before}"

    def _offer(self, where: Where, content: Content) -> None:
        for rank in range(len(self._memories)):
            self._shelf.offered[rank, where[1], content].add(self._digest(rank, where))

    def _check_bytes(self, where: Where, content: Content) -> None:
        for rank in range(len(self._memories)):
            known = self._digest(rank, where) in self._shelf.offered[rank, where[1], content]
            assert known, f"rank {rank}: what came into {where} was never stored for {content}"

    def _digest(self, rank: int, where: Where) -> bytes:
        return blake2b(self._memories[rank][where[0]].rows(where[1])[where[2]].tobytes(), digest_size=16).digest()


class LedgerStoreExecutor(ScriptedStoreExecutor):
    """Reports to the ledger when an operation is sent, and when the cache gets its result.

    `eager` ones have always begun; others begin only what they are asked to answer, and the rest can be cancelled.
    """

    def __init__(self, ranks: Sequence[StoreWorker], ledger: StoreLedger, clock: Clock, *, eager: bool) -> None:
        super().__init__(ranks)
        self._ledger = ledger
        self._eager = eager
        self.detached = False
        self._clock = clock
        self._started_s: dict[JobId, float] = {}

    def submit(self, op: StoreOp) -> None:
        assert not self.detached or isinstance(op.task, (PutPages, PutCheckpoint)), f"{op.task} of a store that has left"
        self._ledger.sent(self, op)
        self._started_s[op.job] = self._clock.now()
        super().submit(op)

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        reply = super().answer(job, timeout_s)
        if reply is not None:
            self._ledger.came(self, reply)
        return reply

    def withdraw(self, job: JobId) -> bool:
        if self._eager or job not in self._tasks:
            return False
        statuses = (ItemStatus.CANCELLED,) * num_items(self._tasks.pop(job).task)
        self._ledger.came(self, Reply(job=job, outcome=Outcome(statuses=statuses), took_s=0.0))
        return True

    def give_up(self, timeout_s: float) -> None:
        """The cache does not wait for those any more that were sent so long ago."""
        latest_start_s = self._clock.now() - timeout_s
        for job in self.pending:
            if self._started_s[job] <= latest_start_s:
                self._ledger.abandoned(self, job)

    def answers(self) -> list[Reply]:
        done = super().answers()
        for reply in done:
            self._ledger.came(self, reply)
        return done
