"""What one store is believed to have follows what the tree does."""

from __future__ import annotations

from stepwell import PrefetchPolicy, StoreConfig, Tier
from stepwell.base.tasks import PutCheckpoint
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.link import Beliefs
from stepwell.tree.node import LossReason, Node
from stepwell.tree.pruning import truncate
from toys import FULL, FULL_POINT, HYBRID, PAGE, Rig, text

AT_ONCE = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)


def beliefs_of(here: Rig) -> Beliefs:
    link = here.cache._store_tier.link
    assert link is not None
    return link.beliefs


def believed(here: Rig) -> dict[tuple[int, int], int]:
    """How many pages are believed of each node, by where it starts and ends."""
    nodes = [node for node in here.tree.nodes() if node.parent is not None]
    return {(node.start, node.end): beliefs_of(here).pages(node) for node in nodes}


def stored_rig() -> Rig:
    here = Rig(FULL, host_pages=64, device_pages=64, store=MemoryStore(), store_config=AT_ONCE)
    here.serve(text(1, 10 * PAGE + 1))
    here.settle()
    assert believed(here) == {(0, 10): 10}
    return here


def leaf(here: Rig) -> Node:
    return list(here.tree.nodes())[-1]


def test_both_parts_of_a_node_that_is_cut_are_believed_as_before() -> None:
    here = stored_rig()
    beliefs_of(here).set_pages(leaf(here), 7)
    here.tree.split(leaf(here), 4)
    assert believed(here) == {(0, 4): 4, (4, 10): 3}
    here.tree.split(leaf(here), 5)
    assert believed(here) == {(0, 4): 4, (4, 9): 3, (9, 10): 0}
    here.cache.audit()


def test_pages_that_come_in_the_place_of_others_are_stored_too() -> None:
    here = stored_rig()
    truncate(here.tree, leaf(here), 4, here.state.loss(LossReason.EVICTED, Tier.HOST))
    assert believed(here) == {(0, 4): 4}
    prompt = [*text(1, 10 * PAGE + 1)[: 4 * PAGE], *text(2, 6 * PAGE + 1)]
    here.serve(prompt)
    here.settle()
    assert sum(believed(here).values()) == 10
    store = here.cache._store_tier.link
    assert store is not None
    after = Rig(FULL, host_pages=64, device_pages=64, store=store.store, store_config=AT_ONCE)
    assert after.serve_fetched(prompt).store == 10 * PAGE
    here.cache.flush()
    assert not beliefs_of(here)._pages
    here.cache.audit()


def test_a_checkpoint_that_left_while_it_was_stored_is_not_believed() -> None:
    config = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=30.0)
    here = Rig(FULL_POINT, host_pages=64, device_pages=64, store=MemoryStore(), store_config=config)
    here.serve(text(1, 10 * PAGE + 1))
    here.settle()
    here.clock.advance(31.0)
    here.cache.step()
    puts = [job for job in here.store_executor.pending if isinstance(here.store_executor.op(job).task, PutCheckpoint)]
    assert puts and beliefs_of(here)._arriving
    here.cache.flush()
    here.store_executor.finish_all()
    here.settle()
    assert not beliefs_of(here)._checkpoints and not beliefs_of(here)._arriving
    here.cache.audit()


def test_what_one_store_has_says_nothing_of_the_next() -> None:
    here = stored_rig()
    first = beliefs_of(here)
    here.cache.store.detach()
    here.attach(MemoryStore(), AT_ONCE)
    assert believed(here) == {(0, 10): 0} and first is not beliefs_of(here)
    here.settle()
    assert believed(here) == {(0, 10): 10}


def test_flushing_right_after_a_store_was_attached_loses_nothing() -> None:
    """What waits in line to be stored is sent off before memory is emptied, and the checkpoints on it."""
    here = Rig(HYBRID, host_pages=64, device_pages=64)
    prompt = text(1, 10 * PAGE + 1)
    here.serve(prompt)
    here.settle()
    store = MemoryStore()
    here.attach(store, StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE))  # which defers the backup of checkpoints
    here.cache.flush()
    here.settle()
    after = Rig(HYBRID, host_pages=64, device_pages=64, store=store, store_config=AT_ONCE)
    assert after.serve_fetched(prompt).store == 10 * PAGE
    here.cache.audit()
