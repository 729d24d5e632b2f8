"""Is a store of use? With everything settled, a prompt resumes exactly where the definition of a restore point says, over what
is in memory and in the store together; and what was served is in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from borrowed_world import BorrowedWorld
from ledger import TOKEN, space_of
from oracle import boundaries, deepest, needs_checkpoint
from shelf import Shelf, StoreSetup
from store_side import COOL_OFF_S, MOST_ROUNDS, StoreSide
from watched import packed

from stepwell import Namespace
from stepwell.base.prompt import PageKey, manifest_key, page_keys

MOST_PLANS = 3  # that a ticket makes: all but the last may find that something is missing after all
SHORTFALLS = (  # counted when less is stored or fetched than could be, for want of space, time or luck
    "save_skipped_no_room", "checkpoint_skipped_no_room", "save_failures", "backup_dropped_queue_full", "backup_dropped_too_old",
    "backup_failures", "store_ops_failed", "prefetch_no_room", "prefetch_not_worth_it", "prefetch_skipped_store_off",
    "store_fetching_stopped",
)  # fmt: skip


class StoreWorld(StoreSide):
    """A device over a host over a store."""

    def __init__(self, setup: StoreSetup, shelf: Shelf | None = None) -> None:
        super().__init__(setup, shelf)
        self.recovered = 0  # tokens that came back from a store in `recover`

    def keys(self, tokens: Sequence[int], namespace: Namespace) -> list[PageKey]:
        return list(page_keys(namespace.digest, packed(tokens), self.spec.page_tokens * TOKEN))

    def shortfalls(self) -> dict[str, int]:
        return {name: self.cache.counters[name] for name in SHORTFALLS}

    def drop_memory(self) -> None:
        """Everything idle leaves every tier, saved first where the policy says so."""
        for _ in range(MOST_ROUNDS):
            waiting = [self.evict(tier) for tier in self.cache._state.tree.tiers]
            self.settle_everything()
            if not any(waiting):
                return
        raise AssertionError("something was to be saved first, again and again")

    def restore_by_definition(self, tokens: Sequence[int], namespace: Namespace, known: int) -> int:
        """The deepest boundary whose pages and checkpoint are in memory or in the attached store.

        Memory has `known` tokens of the prompt; what else is on its way there, if anything, has not arrived.
        """
        line, page = self.attached, self.spec.page_tokens
        assert line is not None
        open_ = space_of(namespace) not in self.ledger.barred
        keys = self.keys(tokens, namespace)

        def in_memory(boundary: int) -> bool:
            return self.cache.lookup(tokens, namespace=namespace, limit_tokens=boundary).restore_tokens == boundary

        return deepest(
            self.spec,
            len(tokens),
            limit=len(tokens),
            has_page=lambda at: at * page < known or (open_ and self.shelf.has_page(line.which, namespace, keys[at])),
            has_checkpoint=lambda boundary: (
                in_memory(boundary) or (open_ and self.shelf.has_checkpoint(line.which, namespace, keys[boundary // page - 1]))
            ),
        )

    def recover(self, tokens: Sequence[int], namespace: Namespace, *, losing: Random | None = None) -> None:
        """A prompt whose turn has come, with nothing under way: it resumes where the definition says, if there is space.

        The store may be `losing` something between what it says and what it is asked for then.
        """
        assert self.attached is not None
        self.clock.advance(2 * COOL_OFF_S)  # a store that was switched off is tried again
        self.settle_everything()  # and what has run out meanwhile leaves
        known = self.cache.lookup(tokens, namespace=namespace).known_tokens
        before = self.shortfalls()
        awaited = self.prefetch(tokens, namespace)
        assert self.cache.counters["prefetch_skipped_store_off"] == before["prefetch_skipped_store_off"], "it is not tried again"
        if losing is not None:
            for line, job in self.pending:
                self.answer_op(line, job)
            self.step()
            keys = self.keys(tokens, namespace)
            self.shelf.lose(losing, {*keys, *map(manifest_key, keys)})
        surprises = self.shelf.num_torn(self.attached.which) + (losing is not None)
        expected = self.restore_by_definition(tokens, namespace, known)
        self.settle_everything()
        certain = self.shortfalls() == before and surprises < MOST_PLANS
        held = self.acquire_awaited(awaited)
        if held is None:
            self.close_ticket(awaited)
            return
        lease = held.lease
        assert lease.resume <= expected, f"{lease} resumes at {lease.resume}, by definition at {expected}"
        if certain:
            assert lease.resume == expected, f"{lease} resumes at {lease.resume}, by definition at {expected}"
            assert lease.sources.store == max(expected - known, 0), f"{lease.sources}, {known} tokens were known"
            self.recovered += lease.sources.store
        self.settle_everything()
        if lease.ready:
            self.check_lease(held)
        self.release(held)

    def check_stored(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """A prompt that was just served, written through or durable, is in the store, as far as anybody could resume from it."""
        line, legal = self.attached, boundaries(self.spec, len(tokens))
        assert line is not None
        if not legal:
            return
        left_one = self.setup.at_prompt_end or not needs_checkpoint(self.spec, legal[0])
        boundary = legal[0] if left_one else self.cache.lookup(tokens, namespace=namespace).restore_tokens
        keys, last = self.keys(tokens, namespace), boundary // self.spec.page_tokens
        missing = [at for at in range(last) if not self.shelf.has_page(line.which, namespace, keys[at])]
        assert not missing, f"pages {missing} of a served prompt were not stored"
        if needs_checkpoint(self.spec, boundary) and boundary:
            assert self.shelf.has_checkpoint(line.which, namespace, keys[last - 1]), f"no checkpoint at {boundary} was stored"


class BorrowedStoreWorld(StoreWorld, BorrowedWorld):
    """A host over a store, under an engine that owns its device memory."""
