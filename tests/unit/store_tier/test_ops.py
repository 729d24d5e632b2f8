"""Operations of a store leave nothing behind when they end, however they do; and a store's threads end once."""

from __future__ import annotations

from stepwell import CacheConfig, StoreConfig, build_cache
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.ops import StoreOps
from toys import FULL, PAGE, SMALL_PAGES, Rig, text
from waiting import step_until

PROMPT = text(1, 10 * PAGE + 1)


def filled() -> MemoryStore:
    store = MemoryStore()
    Rig(FULL, device_pages=256, host_pages=256, store=store).serve(PROMPT)
    return store


def ops_of(here: Rig) -> StoreOps:
    link = here.cache._store_tier.link
    assert link is not None
    return link.ops


def test_what_was_given_up_on_and_can_be_taken_back_later_is_forgotten() -> None:
    """A store hung in the first half of a put: the operation began late, when no request wanted it any more."""
    here = Rig(FULL, device_pages=256, host_pages=256, store=filled())
    ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
    here.cache.step()
    here.clock.advance(100.0)
    here.cache.step()
    ops = ops_of(here)
    assert (ops.num_running, ops.num_awaited) == (1, 0), "some rank may be at it"
    here.store_executor.gone = True
    here.cache.step()
    assert not ops.num_running and not ops._sent
    ticket.close()
    here.idle_check()


def test_a_cache_closes_with_a_store_that_left_while_somebody_held_what_it_brought() -> None:
    """Its threads had ended with its last operation, and were to be ended again."""
    cache = build_cache(FULL, CacheConfig(device_bytes=64 * 1024, host_bytes=64 * 1024), model="toy weights", tuning=SMALL_PAGES)
    cache.store.attach(filled(), StoreConfig(recompute_tokens_per_s=1.0))  # worth it, however busy the machine is
    ticket = cache.prefetch(cache.lookup(PROMPT), awaited=False)
    step_until(cache, lambda: ticket.complete)
    assert ticket.from_store.all()
    cache.store.detach()
    step_until(cache, lambda: all(link.ended for link in cache._store_tier.links))
    assert cache._store_tier.links, "it is kept for the ticket"
    assert cache.close()
