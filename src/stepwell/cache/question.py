"""One question about a prompt, put to the store too: begun now, ready in a later step or when its time is up.

Changes nothing. What the store says is kept here; it counts neither for the store nor against it, and brings nothing up.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from stepwell.base.errors import ConfigError
from stepwell.base.tasks import FindItems, ItemStatus, Outcome
from stepwell.cache.explain import Explanation, StoreSays, explain
from stepwell.store_tier.link import LinkState
from stepwell.store_tier.ops import Call
from stepwell.store_tier.prefetch import boundaries_to_ask
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers.state import CacheState
from stepwell.tree.keys import path_keys
from stepwell.tree.match import Match, find_again

log = logging.getLogger(__name__)

STORE_WAIT_S = 0.25  # a person waits for the answer


class Question:
    """Made by `Cache.question`. Call `step` until it is ready, or `wait`; then `answer`. The cache's thread only."""

    def __init__(self, state: CacheState, store_tier: StoreTier, match: Match, *, store_wait_s: float) -> None:
        if store_wait_s < 0:
            raise ConfigError(f"store_wait_s must be 0 (the store is not asked) or more, got {store_wait_s}")
        self._state = state
        self._store_tier = store_tier
        self._match = match
        self._wait_s = store_wait_s
        self._deadline_s = state.clock.now() + store_wait_s
        self._says = StoreSays(note=self._why_not_asked())
        self._store_error: str | None = None  # in the store's own words, which may name paths and hosts
        self._call = Call()
        self._link = store_tier.link
        self._asked = self._link is not None and not self._says.note and match.restore_tokens < match.limit_tokens
        if self._asked:
            self._says = StoreSays(note=f"the store did not answer within {store_wait_s:g} s, and may have more")
            self._ask()

    @property
    def ready(self) -> bool:
        """Whether the store has answered, or is not waited for any longer."""
        return not self._asked or self._state.clock.now() >= self._deadline_s

    def wait(self) -> None:
        """Waits for the store, as long as the question may. Applies nothing but its answer to this."""
        if not self.ready and self._link is not None:
            self._link.ops.wait(self._job, self._wait_s)

    def cancel(self) -> None:
        """The answer is no longer needed."""
        self._call.cancel()

    def answer(self, *, quote_store: bool = True) -> Explanation:
        """What is known by now, of memory as it is now. `quote_store` false: a store's error goes to the log, not into it."""
        self._call.cancel()
        match, says = self._match, self._says
        if self._store_error is not None and quote_store:
            says = replace(says, note=f"{says.note} ({self._store_error})")
        elif self._store_error is not None:
            log.warning("a store could not say what it has: %s", self._store_error)
            says = replace(says, note=f"{says.note}; the log says why")
        match = find_again(self._state.tree, match)
        if match.known_tokens < self._match.known_tokens and not says.note:
            says = StoreSays(note="memory lost some of it while the store was asked: ask again")
        return explain(self._state, self._store_tier.link, match, says)

    def _why_not_asked(self) -> str:
        link = self._store_tier.link
        if link is None:
            return ""
        if self._match.namespace.digest in link.barred:
            return "its namespace was cleared, so what a store has of it is not used"
        if link.state is LinkState.SWITCHED_OFF:
            return f"the store is {link.state.value}, and was not asked"
        return "" if self._wait_s else "the store was not asked"

    def _ask(self) -> None:
        state, match, page = self._state, self._match, self._state.spec.page_tokens
        known, upto = match.known_tokens // page, match.limit_tokens // page
        keys = path_keys(
            match.namespace.digest, match.path, match.packed, known=known, upto=upto, page_bytes=state.tree.page_bytes
        )
        boundaries = boundaries_to_ask(state, match, upto)
        task = FindItems(pages=keys[known:], boundaries=tuple(keys[page - 1] for page in boundaries))

        def asked(outcome: Outcome, took_s: float) -> None:
            self._asked = False
            if outcome.error is not None or ItemStatus.CANCELLED in outcome.statuses:
                self._says = StoreSays(note="the store could not say what it has")
                self._store_error = outcome.error or "called off"
                return
            found = np.fromiter((status is ItemStatus.OK for status in outcome.statuses), np.bool_, len(outcome.statuses))
            has_page, has_checkpoint = np.zeros(upto, np.bool_), np.zeros(upto + 1, np.bool_)
            has_page[known:] = found[: upto - known]
            has_checkpoint[boundaries] = found[upto - known :]
            self._says = StoreSays(has_page=has_page, has_checkpoint=has_checkpoint)

        assert self._link is not None
        self._job = self._link.ops.send(task, match.namespace, asked, call=self._call, counts=False)
