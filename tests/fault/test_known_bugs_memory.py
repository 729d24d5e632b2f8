"""Known bugs of earlier systems, groups A and B: who owns a page, and who releases it."""

from __future__ import annotations

import pytest

from stepwell import Kind, LeaseError, LeaseState, Point, Prefix, StateSpec, Tier, WritePolicy
from stepwell.base.ids import CACHED_KINDS
from stepwell.base.tasks import Purpose
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import LossReason
from toys import ALL_MODELS, FULL, FULL_WINDOW, HYBRID, KV, OBJECT_BYTES, Rig, model, swa, text


def test_dropping_a_prefix_leaves_window_pages_that_changed_hands_alone() -> None:
    """A1: evicting a path must not free window pages that were freed before and belong to another request by now."""
    rig = Rig(FULL_WINDOW)
    old = text(1, 17)
    rig.serve(old)
    checkpoint = rig.cache.lookup(old).checkpoint
    assert checkpoint is not None
    residency = checkpoint.residencies[Tier.DEVICE]
    assert residency is not None
    freed = set(residency.windows.tolist())
    drop_residency(rig.tree, residency, rig.state.loss(LossReason.EVICTED, Tier.DEVICE))
    lease = rig.ready(text(2, 12))
    rig.prefill(lease)
    assert freed & set(lease.window_pages.tolist()), "the pages were not reused: this proves nothing"
    rig.cache.clear()
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_pages_let_go_during_a_copy_are_free_once_it_ends() -> None:
    """A2: what is given up while a copy runs is freed when the copy ends: not before, not twice, and nothing leaks."""
    rig = Rig(HYBRID, host_pages=64)
    lease = rig.ready(text(1, 17))
    rig.prefill(lease, 16)
    rig.compute(lease, 17)
    rig.cache.release(lease)
    busy = {kind: rig.used(Tier.DEVICE, kind) for kind in CACHED_KINDS}
    lease = rig.ready(text(2, 17))
    rig.compute(lease, 16)
    assert rig.pending(Purpose.SAVE), "no copy is running: this proves nothing"
    rig.cache.clear()
    rig.cache.release(lease)
    rig.cache.audit()
    assert any(rig.used(Tier.DEVICE, kind) for kind in CACHED_KINDS), "pages were freed under a running copy"
    rig.settle()
    rig.cache.audit()
    assert all(busy.values()) and not any(rig.used(tier, kind) for tier in (Tier.DEVICE, Tier.HOST) for kind in CACHED_KINDS)


@pytest.mark.parametrize("page_tokens", [1, 4, 8])
@pytest.mark.parametrize("prompt", range(1, 18))
def test_partial_tail_page_is_given_back_once(page_tokens: int, prompt: int) -> None:
    """A3: a prompt that ends inside a page owns that page once, and frees it once."""
    rig = Rig(model(KV, page_tokens=page_tokens))
    lease = rig.ready(text(1, prompt))
    rig.prefill(lease)
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == -(-prompt // page_tokens)
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == prompt // page_tokens


@pytest.mark.parametrize("prompt", range(1, 10))
@pytest.mark.parametrize("answer", [1, 2, 5])
def test_prompt_tail_and_answer_tail_in_one_page_count_once(prompt: int, answer: int) -> None:
    """A4: the end of the prompt and the end of the answer may share a page, which is still one page."""
    rig = Rig(FULL_WINDOW)
    lease = rig.ready(text(1, prompt))
    rig.prefill(lease)
    rig.decode(lease, text(2, answer))
    assert len(lease.prefix_pages) == -(-(prompt + answer) // 4)
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == (prompt + answer) // 4


@pytest.mark.parametrize("commits_first", [True, False])
def test_filling_a_gap_in_the_tree_leaves_running_requests_alone(commits_first: bool) -> None:
    """A5: when one request brings back pages the tree had lost, others keep reading the pages they hold."""
    rig = Rig(FULL, host_pages=64)
    prompt = text(1, 17)
    slow = rig.ready(prompt)  # nothing is cached yet: it computes everything itself
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    if commits_first:
        rig.compute(slow, 17)
    loading = rig.open(prompt)
    assert loading.sources.host == (0 if commits_first else 16)
    if not commits_first:
        rig.compute(slow, 17)
    rig.settle()
    pages = slow.prefix_pages.tolist(), loading.prefix_pages.tolist()
    assert rig.serve([*prompt, 3, 4]).device == 16
    assert (slow.prefix_pages.tolist(), loading.prefix_pages.tolist()) == pages
    for lease in (slow, loading):
        rig.engine.check(lease)
        rig.cache.release(lease)
    rig.idle_check()


@pytest.mark.parametrize("window", [1, 3, 4, 7, 8, 13])
def test_window_pages_given_back_never_return_in_a_later_checkpoint(window: int) -> None:
    """A6: a window that slid on is gone; the checkpoint at the end consists of pages the request still holds."""
    rig = Rig(model(KV, swa(window)))
    prompt = text(1, 33)
    lease = rig.ready(prompt)
    for upto in (5, 6, 11, 18, 19, 27, 32, 33):
        rig.compute(lease, upto)
        rig.settle()
        assert lease.first_window == max(upto - window, 0) // rig.spec.window_page_tokens
        rig.engine.check(lease)
    rig.cache.release(lease)
    rig.serve(text(2, 65))  # takes the pages that were freed
    assert rig.serve(prompt).device == 32


def test_every_byte_of_every_part_survives_a_round_trip() -> None:
    """A7: rows of odd widths (scales behind the values, say) keep all of their bytes on the way down and up."""
    states = (
        StateSpec(name="kv", shape=Prefix(), layers=3, row_bytes=13, dtype="fp8"),
        StateSpec(name="index", shape=Prefix(ratio=2), layers=2, row_bytes=7, dtype="fp8"),
        swa(6),
        StateSpec(name="conv", shape=Point(), layers=5, row_bytes=11, dtype="u8"),
        StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=33, dtype="u8"),
    )
    rig = Rig(model(*states), device_pages=400, host_pages=400)
    rig.serve(text(1, 25))
    rig.evict_all(Tier.DEVICE)
    before = rig.engine.bytes_checked
    assert rig.serve(text(1, 25)).host == 24
    everything = 24 * 3 * 13 + 12 * 2 * 7 + 6 * 8 + 5 * 11 + 33
    assert rig.engine.bytes_checked - before >= everything


def test_all_prefix_states_share_one_object_and_one_budget() -> None:
    """A8: a state that follows another (an index, a draft) cannot have a smaller pool, nor live outside the budget."""
    index = StateSpec(name="index", shape=Prefix(), layers=2, row_bytes=4, dtype="u8")
    rig = Rig(model(KV, index), device_pages=20)
    assert rig.spec.object_bytes(Kind.PREFIX) == 2 * OBJECT_BYTES
    for name in range(6):
        rig.serve(text(name, 13))
        assert rig.cache.stats().tier(Tier.DEVICE).used_bytes <= 20 * OBJECT_BYTES
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 9  # of ten: the last prompt gave its partial page back


def test_releasing_one_lease_never_frees_what_another_reads() -> None:
    """B1: two requests on one checkpoint; the first to leave takes its own references and no others."""
    rig = Rig(HYBRID, device_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    first, second = rig.ready(prompt), rig.ready(prompt)
    assert first.prefix_pages[0] == second.prefix_pages[0] and first.window_pages[0] == second.window_pages[0]
    rig.cache.release(first)
    rig.evict_all(Tier.DEVICE)
    rig.cache.audit()
    rig.engine.check(second)
    rig.prefill(second)
    rig.cache.release(second)
    rig.idle_check()


def test_abort_of_the_first_loader_leaves_the_pages_to_the_second() -> None:
    """B2: pages held while they were absent and released after they were filled: the counts are those of the pages."""
    rig = Rig(HYBRID, host_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    first = rig.open(prompt)
    second = rig.open(prompt)
    assert first.state is second.state is LeaseState.LOADING
    rig.cache.release(first)
    rig.cache.audit()
    rig.settle()
    assert second.ready
    rig.engine.check(second)
    rig.cache.release(second)
    rig.idle_check()


@pytest.mark.parametrize("spec", ["window", "point", "hybrid"])
def test_a_checkpoint_left_behind_is_let_go_as_one(spec: str) -> None:
    """B3: a request that decoded past its restored checkpoint holds neither its windows nor its point any more."""
    rig = Rig(ALL_MODELS[spec], device_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    lease = rig.ready(prompt)
    residency = lease.restored
    assert residency is not None and residency.users == 1
    rig.prefill(lease)
    rig.decode(lease, text(2, 12))
    assert lease.restored is None and residency.users == 0
    rig.evict_all(Tier.DEVICE)
    assert rig.restore(prompt) == 0
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_evicting_a_checkpoint_spares_the_pages_it_stands_on() -> None:
    """B4: a checkpoint may go while a request reads the prefix below it; the prefix stays, for the request and in the tree."""
    rig = Rig(HYBRID, device_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    lease = rig.ready([*prompt, 1, 2])
    rig.prefill(lease)
    rig.evict_all(Tier.DEVICE)
    rig.cache.audit()
    assert rig.cache.lookup(prompt).known_tokens == 16
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_a_lease_is_given_back_exactly_once() -> None:
    """B5: the receipt is the lease itself: a second release is an error and takes nothing from anybody."""
    rig = Rig(HYBRID, write=WritePolicy.EXCLUSIVE, host_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    other = rig.ready(prompt)
    with rig.ready(prompt) as lease:
        rig.cache.release(lease)
    with pytest.raises(LeaseError, match="already, or belongs to another cache"):
        rig.cache.release(lease)
    rig.cache.audit()
    rig.engine.check(other)
    rig.cache.release(other)
    rig.idle_check()
