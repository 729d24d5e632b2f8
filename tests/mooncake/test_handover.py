"""A prompt that one engine computed and another goes on from: the same bits as on one engine, or the prompt is computed again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import pytest
from handed import WAIT, WIRE, Decode, Prefill

from engine.drafted import OWN, engine_for, prompts
from engine.families import FAMILIES, checkpoint
from engine.worker_engines import open_engine
from parity.recorded import PAGE, Played, Recorded, distance, same_bits
from parity.spilling import short
from stepwell.base.ids import Kind, Tier
from stepwell.engine import Engine, GenerateRequest, Sampling
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.store.memory import MemoryStore
from stepwell.store.peer.lane import Lane, SharedHost, Shown
from stepwell.store.peer.store import PeerStore
from stepwell.store_tier.hand_out import is_on_host, listing_of
from stepwell.transfer.store_worker import StoreWorker
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import LossReason
from waiting import run_to_the_end, settle, step_until

pytest.importorskip("transformers")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def some_prompt(seed: int = 3, tokens: int = 9 * PAGE + 5) -> list[int]:
    random = Random(seed)
    return [random.randrange(128) for _ in range(tokens)]


def on_one_engine(family: str | Checkpoint, prompt: list[int], **settings: object) -> Played:
    """The same two requests, one after the other, on the same engine."""
    recorded = Recorded(family, **settings)
    recorded.play(prompt, answer=1)
    played = recorded.play(prompt)
    recorded.close()
    return played


def check_computed(played: Played, family: str) -> None:
    """It was computed from the beginning, and is right."""
    recorded = Recorded(family)
    cold = recorded.play(played.prompt)
    recorded.close()
    assert played.resumed == 0 and same_bits(played, cold), f"resumed at {played.resumed}, differs by {distance(played, cold)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_one_engine(stack: ExitStack, family: str) -> None:
    prompt = some_prompt()
    one = on_one_engine(family, prompt)
    prefill, decode = Prefill(stack, family), Decode(stack, family)
    out = prefill.compute(prompt)
    played = decode.play(prompt, prefill.listing(out))
    assert played.resumed == one.resumed == out.tokens > 0
    assert played.stored == out.tokens
    assert played.chunks == one.chunks and same_bits(played, one), f"differs by {distance(played, one)}"
    assert not decode.counters.get("store_ops_failed")
    prefill.recorded.engine.cache.pins.release(out.pin)
    prefill.recorded.engine.cache.audit()


def test_rows_of_sparse_decode_stay_on_the_host_of_a_small_device(stack: ExitStack) -> None:
    family, prompt = short(checkpoint("deepseek_v32")), some_prompt(tokens=40 * PAGE + 5)
    sparse = {"sparse": "dsa", "hot_rows": 48, "host_memory": "16MiB"}
    one = on_one_engine(family, prompt, device_memory="8MiB", **sparse)
    prefill = Prefill(stack, family, device_memory="8MiB", **sparse)
    decode = Decode(stack, family, device_memory="800KiB", **sparse)
    played = decode.play(prompt, prefill.listing(prefill.compute(prompt)))
    assert played.stored == played.resumed == one.resumed > 0
    assert decode.counters["loaded_index_only_pages"] > 0, "of some pages the device has the index alone"
    assert same_bits(played, one)


def test_drafts_are_handed_over_too(stack: ExitStack) -> None:
    (prompt,) = prompts((6 * PAGE + 3,))
    ask = GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=12))

    def answer(engine: Engine) -> tuple[list[int], int, int]:
        engine.submit(ask)
        deltas = run_to_the_end(engine)
        usage = next(delta.usage for delta in deltas if delta.usage is not None)
        return [token for delta in deltas for token in delta.tokens], usage.accepted_tokens, usage.sources.store

    with engine_for("deepseek_v3", OWN) as alone:
        answer(alone)
        tokens, accepted, _ = answer(alone)
    assert accepted
    there, here = SharedHost(), SharedHost()
    with (
        engine_for("deepseek_v3", OWN, host_block=there.make) as prefill,
        engine_for("deepseek_v3", OWN, host_block=here.make) as decode,
    ):
        shown = Shown(there, WIRE)
        stack.callback(shown.close)
        answer(prefill)
        settle(prefill.cache)
        out = prefill.cache.hand_out(prompt, ttl_s=600)
        assert out is not None
        (pages,) = prefill.cache.store.host_pages
        store = PeerStore(here, partial(Lane, here, WIRE), stall_s=60)
        decode.cache.store.attach(store, WAIT)
        decode.stores.append(store)
        worker = StoreWorker(MemoryStore(0), pages)
        store.add("a", "prefill", listing_of(out, worker, pages.block, address=shown.address, session=shown.session))
        assert answer(decode) == (tokens, accepted, out.tokens), "drafts guess as well as where the prompt was computed"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4"])
def test_two_ranks_hand_over_to_one_and_one_to_two(stack: ExitStack, family: str, tmp_path: Path) -> None:
    prompt = some_prompt(tokens=300)  # pages of V4 have 256 by themselves
    for there_ranks, here_ranks in ((2, 1), (1, 2)):
        there, here = SharedHost(), SharedHost()
        with (
            open_engine(family, tmp_path, there_ranks, host_block=there.make) as prefill,
            open_engine(family, tmp_path, here_ranks, host_block=here.make) as decode,
        ):
            shown = Shown(there, WIRE)
            stack.callback(shown.close)
            expected = prefill.generate(prompt, max_tokens=8).tokens
            settle(prefill.cache)
            out = prefill.cache.hand_out(prompt, ttl_s=600)
            assert out is not None
            (pages,) = prefill.cache.store.host_pages
            store = PeerStore(here, partial(Lane, here, WIRE), stall_s=60)
            decode.cache.store.attach(store, WAIT)
            decode.stores.append(store)
            worker = StoreWorker(MemoryStore(0), pages)
            store.add("a", "prefill", listing_of(out, worker, pages.block, address=shown.address, session=shown.session))
            answer = decode.generate(prompt, max_tokens=8)
            assert answer.tokens == expected and answer.usage.sources.store == out.tokens > 0
            settle(decode.cache)
            decode.cache.audit()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_page_that_is_damaged_on_the_way_is_computed(stack: ExitStack, family: str) -> None:
    prompt = some_prompt()
    prefill, decode = Prefill(stack, family), Decode(stack, family)
    out = prefill.compute(prompt)
    listing = prefill.listing(out)
    (pages,) = prefill.recorded.engine.cache.store.host_pages
    page = pages.view(Kind.PREFIX, int(out.pages.ids[0]))
    page[7] ^= 1
    played = decode.play(prompt, listing)
    check_computed(played, family)
    assert decode.counters["store_damaged"] == 1
    page[7] ^= 1


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_checkpoint_that_is_damaged_on_the_way_is_not_resumed_at(stack: ExitStack, family: str) -> None:
    prompt = some_prompt()
    prefill, decode = Prefill(stack, family), Decode(stack, family)
    out = prefill.compute(prompt)
    listing = prefill.listing(out)
    assert out.checkpoint is not None
    (pages,) = prefill.recorded.engine.cache.store.host_pages
    kind, ids = (Kind.POINT, out.checkpoint.points) if len(out.checkpoint.points) else (Kind.WINDOW, out.checkpoint.windows)
    page = pages.view(kind, int(ids[0]))
    page[7] ^= 1
    check_computed(decode.play(prompt, listing), family)
    page[7] ^= 1


def test_a_prefill_server_that_was_killed_costs_a_computation(stack: ExitStack) -> None:
    prompt = some_prompt()
    prefill, decode = Prefill(stack, "qwen3_next"), Decode(stack, "qwen3_next")
    listing = prefill.listing(prefill.compute(prompt))
    os.kill(prefill.shown.pid, signal.SIGKILL)
    check_computed(decode.play(prompt, listing), "qwen3_next")
    assert decode.store.counters.snapshot()["peer_lanes_lost"] == 1


def test_a_prefill_server_that_stopped_costs_a_computation_and_later_pages_stay_right(stack: ExitStack) -> None:
    prompt, family = some_prompt(), "gemma3"
    prefill, decode = Prefill(stack, family), Decode(stack, family, stall_s=1.0)
    listing = prefill.listing(prefill.compute(prompt))
    os.kill(prefill.shown.pid, signal.SIGSTOP)
    played = decode.play(prompt, listing)
    check_computed(played, family)
    os.kill(prefill.shown.pid, signal.SIGCONT)
    decode.recorded.evict_to_host()
    again = decode.recorded.play(prompt)
    assert again.resumed > 0 and again.tokens == played.tokens


def test_pages_of_a_decode_server_that_never_came_are_freed(stack: ExitStack) -> None:
    prefill = Prefill(stack, "qwen3_next")
    cache = prefill.recorded.engine.cache
    out = prefill.compute(some_prompt(), ttl_s=0.001)
    step_until(cache, lambda: not out.pin.held)
    cache.flush()
    assert not cache.stats().tier(Tier.HOST).used_bytes
    cache.audit()


def test_nothing_is_handed_out_before_the_host_has_all_of_it(stack: ExitStack) -> None:
    prefill, prompt = Prefill(stack, "qwen3_next"), some_prompt()
    cache = prefill.recorded.engine.cache
    assert cache.hand_out(prompt, ttl_s=60) is None
    out = prefill.compute(prompt)
    cache.pins.release(out.pin)
    match = cache.lookup(prompt)
    assert match.checkpoint is not None
    residency = match.checkpoint.ready_in(Tier.HOST)
    assert residency is not None
    drop_residency(cache._state.tree, residency, cache._state.loss(LossReason.EVICTED, Tier.HOST))
    assert not is_on_host(cache._state, cache.lookup(prompt)), "its checkpoint is on the device alone"
    assert cache.hand_out(prompt, ttl_s=60) is None
