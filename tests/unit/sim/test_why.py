"""Every computed token has exactly one reason, and it is the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import BLOCK, END_ONLY, ListTrace, branching, request, setup

from stepwell.base.config import WritePolicy
from stepwell.base.ids import Tier
from stepwell.base.spec import Prefix, StateSpec
from stepwell.sim.hardware import Hardware
from stepwell.sim.replay import Replay
from stepwell.sim.setup import Setup
from stepwell.sim.trace import TraceRequest
from stepwell.sim.why import ADVICE, MEANING, Reason
from stepwell.sim.why_page import draw_explained
from stepwell.sim.why_replay import Inquiry, explain_trace
from stepwell.store.api import Space
from toys import ALL_MODELS, EVICTIONS, FULL, FULL_POINT, HYBRID, KV, OBJECT_BYTES, model

ALIGNED = model(KV, StateSpec(name="index", shape=Prefix(), layers=1, row_bytes=4, dtype="u8", align=8))
PLENTY = 4096


def reasons(requests: Sequence[TraceRequest], using: Setup, *, block_tokens: int = BLOCK) -> list[Mapping[Reason, int]]:
    """What each request lacked, leaving out what it did not lack; audited at the end."""
    inquiry = Inquiry(using, block_tokens=block_tokens)
    found = [{reason: tokens for reason, tokens in inquiry.serve(each).items() if tokens} for each in requests]
    inquiry.replay.cache.audit()
    return found


# ---- each reason, on a trace made for it ----------------------------------------------------------


def test_what_nobody_had_is_first_use() -> None:
    assert reasons([request(0, [1, 2]), request(1, [1, 3])], setup(device_pages=32)) == [
        {Reason.FIRST_USE: 9},
        {Reason.FIRST_USE: 5},
    ]


def test_the_last_token_of_a_known_prompt_is_alignment() -> None:
    whole = request(0, [1, 2], tail=0)
    found = reasons([whole, replace(whole, at_s=1.0)], setup(device_pages=32))
    assert found[1] == {Reason.ALIGNMENT: BLOCK}, "the page of the last token is computed again"


def test_part_of_a_page_is_alignment() -> None:
    # Blocks of 2 tokens in pages of 4: three shared blocks are one page and a half.
    def short(at_s: float, blocks: Sequence[int]) -> TraceRequest:
        return replace(request(at_s, blocks), prompt_tokens=2 * len(blocks))

    found = reasons([short(0, [1, 2, 3, 4]), short(1, [1, 2, 3, 9])], setup(device_pages=32), block_tokens=2)
    assert found[1] == {Reason.ALIGNMENT: 2, Reason.FIRST_USE: 2}


def test_a_boundary_that_is_not_legal_is_alignment() -> None:
    found = reasons([request(0, [1, 2, 3]), request(1, [1, 2, 3, 4])], setup(ALIGNED, device_pages=32))
    assert found[1] == {Reason.ALIGNMENT: BLOCK, Reason.FIRST_USE: BLOCK + 1}


def test_pages_that_are_gone_are_an_evicted_prefix() -> None:
    found = reasons([request(0, [1, 2]), request(1, range(10, 17)), request(2, [1, 2])], setup(device_pages=8))
    assert found[2] == {Reason.EVICTED_PREFIX: 2 * BLOCK, Reason.FIRST_USE: 1}


def test_pages_that_moved_to_the_host_or_the_store_are_not_evicted() -> None:
    requests = [request(0, [1, 2]), request(1, range(10, 17)), request(2, [1, 2])]
    assert reasons(requests, setup(device_pages=8, host_pages=64))[2] == {Reason.FIRST_USE: 1}
    slow = Hardware(prefill_tokens_per_s=1)
    below = setup(device_pages=8, host_pages=8, store_bytes=PLENTY * OBJECT_BYTES, hardware=slow)
    assert reasons(requests, below)[2] == {Reason.FIRST_USE: 1}


def test_pages_that_the_store_gave_up_are_an_evicted_prefix() -> None:
    slow = Hardware(prefill_tokens_per_s=1)
    using = setup(device_pages=8, host_pages=8, store_bytes=PLENTY * OBJECT_BYTES, hardware=slow)
    inquiry = Inquiry(using, block_tokens=BLOCK)
    inquiry.serve(request(0, [1, 2]))
    assert inquiry.replay.store is not None
    keys = list(inquiry.replay.store._values)
    inquiry.serve(request(1, range(10, 17)))
    inquiry.replay.store.delete(Space(digest=bytes(32)), keys[1:])
    found = inquiry.serve(request(2, [1, 2]))
    assert (found[Reason.EVICTED_PREFIX], found[Reason.FIRST_USE]) == (BLOCK, 1)


def test_a_branch_inside_a_prompt_has_no_checkpoint() -> None:
    found = reasons([request(0, [1, 2, 3, 4]), request(1, [1, 2, 3, 9])], setup(FULL_POINT, device_pages=32))
    assert found[1] == {Reason.NO_CHECKPOINT: 3 * BLOCK, Reason.FIRST_USE: BLOCK + 1}


def test_with_a_checkpoint_before_the_branch_only_what_follows_it_lacks_one() -> None:
    requests = [request(0, [1, 2]), request(1, [1, 2, 3, 4]), request(2, [1, 2, 3, 9])]
    assert reasons(requests, setup(FULL_POINT, device_pages=32))[2] == {Reason.NO_CHECKPOINT: BLOCK, Reason.FIRST_USE: BLOCK + 1}


def test_a_checkpoint_that_is_gone_from_pages_that_are_not_is_told_from_one_that_never_was() -> None:
    inquiry = Inquiry(setup(FULL_POINT, device_pages=64), block_tokens=BLOCK)
    inquiry.serve(request(0, [1, 2]))
    inquiry.serve(request(1, [1, 2, 3, 4]))
    drop_checkpoint(inquiry.replay, request(1, [1, 2, 3, 4]), page=2)
    found = inquiry.serve(request(2, [1, 2, 3, 9]))
    assert (found[Reason.CHECKPOINT_EVICTED], found[Reason.NO_CHECKPOINT]) == (2 * BLOCK, BLOCK)
    inquiry.replay.cache.audit()


def drop_checkpoint(replay: Replay, of: TraceRequest, *, page: int) -> None:
    from stepwell.base.ids import Tier
    from stepwell.sim.trace import prompt_of
    from stepwell.tree.checkpoints import drop_residency
    from stepwell.tree.node import LossReason

    state = replay.cache._state
    for node in replay.cache.lookup(prompt_of(of, BLOCK, number=1)).path:
        if node.checkpoints and page in node.checkpoints:
            residency = node.checkpoints[page].residencies[Tier.DEVICE]
            assert residency is not None
            drop_residency(state.tree, residency, state.loss(LossReason.EVICTED, Tier.DEVICE))
            return
    raise AssertionError(f"no checkpoint at page {page}")


def test_a_prompt_larger_than_the_device_was_never_stored() -> None:
    large = request(0, range(64))
    found = reasons([large, replace(large, at_s=1.0), request(2, [0, 1])], setup(device_pages=32))
    assert found[1] == {Reason.NEVER_STORED: 64 * BLOCK, Reason.FIRST_USE: 1}
    assert found[2] == {Reason.NEVER_STORED: 2 * BLOCK, Reason.FIRST_USE: 1}


def test_what_is_there_but_not_restored_is_unused() -> None:
    found = reasons([request(0, range(8)), request(1, range(64))], setup(device_pages=32))
    assert found[1] == {Reason.UNUSED: 8 * BLOCK, Reason.FIRST_USE: 56 * BLOCK + 1}, "the device cannot hold it"
    slow = Hardware(prefill_tokens_per_s=1e6, store_latency_s=1)
    below = setup(device_pages=48, host_pages=64, store_bytes=PLENTY * OBJECT_BYTES, hardware=slow)
    explained = explain_trace(ListTrace(requests=branching(300, seed=4)), below, policy="p").total
    assert explained.tokens[Reason.UNUSED] > 0 == explained.tokens[Reason.EVICTED_PREFIX], (
        "all of it is in the store, which is too slow"
    )


# ---- sums -----------------------------------------------------------------------------------------


@st.composite
def settings_of_replays(draw: st.DrawFn) -> Setup:
    spec = draw(st.sampled_from([*ALL_MODELS.values(), ALIGNED]))
    host = draw(st.sampled_from([None, 24, 96]))
    store = None if host is None else draw(st.sampled_from([None, 16, 64, PLENTY]))
    interval = draw(st.sampled_from([0, 8, 16]))
    return setup(
        spec,
        device_pages=draw(st.sampled_from([24, 40, 64])),
        host_pages=host,
        store_bytes=None if store is None else store * OBJECT_BYTES,
        write=draw(st.sampled_from(list(WritePolicy))),
        eviction=draw(st.sampled_from(list(EVICTIONS.values()))),
        placement=replace(END_ONLY, interval_tokens=interval, at_branch=draw(st.booleans())),
        hardware=Hardware(prefill_tokens_per_s=draw(st.sampled_from([10.0, 1e6]))),
    )


@given(using=settings_of_replays(), seed=st.integers(0, 10_000))
def test_reasons_add_up_to_what_a_plain_replay_computes(using: Setup, seed: int) -> None:
    requests = branching(24, seed=seed, tails=(0, 1, 3, 7))
    plain = Replay(using, block_tokens=BLOCK)
    inquiry = Inquiry(using, block_tokens=BLOCK)
    for each in requests:
        assert sum(inquiry.serve(each).values()) == plain.serve(each).computed, "asking changes nothing"
    inquiry.replay.cache.audit()


@given(seed=st.integers(0, 10_000), block=st.sampled_from([2, 3, 8, 12]))
def test_reasons_add_up_when_blocks_are_not_pages(seed: int, block: int) -> None:
    requests = [
        replace(each, prompt_tokens=max(each.prompt_tokens * block // BLOCK - seed % 3, 1)) for each in branching(24, seed=seed)
    ]
    requests = [replace(each, blocks=each.blocks[: -(-each.prompt_tokens // block)]) for each in requests]
    using = setup(HYBRID, device_pages=128, host_pages=256)
    explained = explain_trace(ListTrace(requests=requests, block_tokens=block), using, policy="p").total
    assert (
        sum(explained.tokens.values())
        == explained.computed_tokens
        <= explained.prompt_tokens
        == sum(e.prompt_tokens for e in requests)
    )


def test_with_endless_memory_nothing_is_evicted_and_full_attention_lacks_only_what_is_new() -> None:
    requests = branching(200, seed=1, tails=(0, 1, 3))
    explained = explain_trace(ListTrace(requests=requests), setup(FULL, device_pages=PLENTY), policy="p").total
    assert {reason for reason, tokens in explained.tokens.items() if tokens} == {Reason.FIRST_USE, Reason.ALIGNMENT}
    explained = explain_trace(ListTrace(requests=requests), setup(HYBRID, device_pages=PLENTY), policy="p").total
    assert {reason for reason, tokens in explained.tokens.items() if tokens} == {
        Reason.FIRST_USE, Reason.ALIGNMENT, Reason.NO_CHECKPOINT,
    }  # fmt: skip


def test_checkpoints_at_every_page_are_evicted_but_never_missing() -> None:
    everywhere = replace(END_ONLY, interval_tokens=BLOCK)
    using = setup(FULL_POINT, device_pages=96, placement=everywhere)
    explained = explain_trace(ListTrace(requests=branching(200, seed=3)), using, policy="p").total
    assert explained.tokens[Reason.CHECKPOINT_EVICTED] > 0
    assert explained.tokens[Reason.NO_CHECKPOINT] == 0


def test_sessions_add_up_and_the_worst_come_first() -> None:
    requests = [replace(each, session=str(at % 3)) for at, each in enumerate(branching(120, seed=8))]
    explained = explain_trace(ListTrace(requests=requests), setup(device_pages=48), policy="p")
    assert sum(each.computed_tokens for each in explained.sessions.values()) == explained.total.computed_tokens
    again = [verdict.again_tokens for _, verdict in explained.worst(2)]
    assert len(again) == 2 and again[0] >= again[1] >= min(each.again_tokens for each in explained.sessions.values())


def test_the_page_escapes_the_names_of_sessions() -> None:
    requests = [replace(each, session="<i>mine</i>") for each in branching(60, seed=8)]
    explained = explain_trace(ListTrace(requests=requests), setup(device_pages=32), policy="p")
    html = draw_explained([explained], {Tier.DEVICE: 32 * OBJECT_BYTES}, worst=3)
    assert "<i>" not in html and "&lt;i&gt;mine" in html


def test_the_page_says_how_much_memory_there_was_and_leaves_out_sessions_that_lack_nothing() -> None:
    once = [replace(request(0, [1, 2, 3]), session="once")]
    explained = explain_trace(ListTrace(requests=once), setup(device_pages=32), policy="p")
    html = draw_explained([explained], {Tier.DEVICE: 3 * 2**30, Tier.HOST: 2**40}, worst=3)
    assert "device 3 GiB, host 1 TiB" in html
    assert "The worst of" not in html


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_says_what_it_means_and_what_helps(reason: Reason) -> None:
    assert MEANING[reason] and ADVICE[reason]
