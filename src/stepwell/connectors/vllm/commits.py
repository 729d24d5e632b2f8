"""What a step will compute of a request is offered to the cache: which boundaries get a checkpoint, and which blocks hold it all.

Commits come before the computation; saves begin when it is over. Decides nothing about requests. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepwell.cache.facade import Cache
from stepwell.connectors.vllm.groups import Names, Offered, Table
from stepwell.tiers.lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """What a step computes of one request: tokens `[computed, upto)`, of which `known` have ids by now."""

    request: str
    computed: int
    upto: int
    known: int
    table: Callable[[], Table]
    offered: Offered  # blocks with the state of boundaries, beside those of the table


class Commits:
    """Over one cache. Its thread."""

    def __init__(self, cache: Cache, names: Names) -> None:
        self._cache = cache
        self._names = names

    def commit(self, lease: Lease, step: Computing, tokens: Callable[[int], list[int]]) -> None:
        """Offers what will be computed: first the boundaries that get a checkpoint, then all whole pages.

        `tokens` are the request's, from one on. Raises BadTokens.
        """
        page_tokens = self._cache.spec.page_tokens
        upto = min(step.upto, step.known)
        full = upto - upto % page_tokens
        if full <= lease.position:
            return
        if step.known > lease.num_tokens:
            self._cache.append(lease, tokens(lease.num_tokens))
        table = step.table()
        for boundary in self._boundaries(lease, step, full):
            source = self._names.with_checkpoint(
                table, self._unsaved(lease, boundary), boundary, ahead=True, offered=step.offered
            )  # fmt: skip
            if source is not None:
                self._cache.commit(lease, boundary, source=source, checkpoint=True)
        if full > lease.position:
            source = self._names.pages(table, self._unsaved(lease, full), full, ahead=True)
            self._cache.commit(lease, full, source=source, checkpoint=False)

    def _boundaries(self, lease: Lease, step: Computing, full: int) -> list[int]:
        """Where checkpoints should be left and there may be state for them, in order.

        Windows are whole at every boundary of a step. Recurrent state exists where the engine says so, and where steps end.
        """
        if self._names.has_points:
            offered = {boundary for _, boundary in step.offered}
            ends = {boundary for boundary in (step.computed, step.upto) if self._cache.wants_checkpoint(lease, boundary)}
            wanted = {boundary for boundary in offered if self._cache.spec.is_legal(boundary)} | ends
            return sorted(boundary for boundary in wanted if lease.position < boundary <= full)
        page_tokens = self._cache.spec.page_tokens
        pages = range(lease.position // page_tokens + 1, full // page_tokens + 1)
        return [page * page_tokens for page in pages if self._cache.wants_checkpoint(lease, page * page_tokens)]

    def _unsaved(self, lease: Lease, upto: int) -> int:
        return min(self._cache.first_unsaved(lease) * self._cache.spec.page_tokens, upto)
