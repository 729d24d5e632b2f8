"""Prompts that another engine computed, one after the other onto a small device whose rows spill: nothing hangs, nothing leaks.

The transfer engine is left out: its place takes a copy between the two hosts' memories. Everything else is what a decode server
runs. With the transfer engine, one prompt at a time, it is in `tests/mooncake/test_handover.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from engine.families import checkpoint
from engine.small import DEFAULTS, PAGE, greedy, prompt, tokens_of
from parity.spilling import poison_freed, report, short
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.ids import Tier
from stepwell.engine import Delta, Engine, EngineConfig, Limits, build_engine
from stepwell.engine.requests.request import Usage
from stepwell.store.memory import MemoryStore
from stepwell.store.peer.lane import Entry, SharedHost
from stepwell.store.peer.store import PeerStore
from stepwell.store_tier.hand_out import HandOut, listing_of
from stepwell.transfer.store_worker import StoreWorker
from waiting import PATIENCE_S, run_to_the_end, run_until, settle

pytest.importorskip("transformers")

WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0)  # however busy the machine is
FAMILY = "deepseek_v32"


def engine_for(host: SharedHost, **settings: Any) -> Engine:
    limits = Limits(chunk_tokens=64, max_running=6)
    config = DEFAULTS | {"host_block": host.make, "limits": limits} | settings
    return build_engine(short(checkpoint(FAMILY)), EngineConfig(**config))


class CopyLane:
    """The way from the other host into ours, without a transfer engine."""

    pid = 0

    def __init__(self, source: SharedHost, target: SharedHost) -> None:
        assert source._block is not None and target._block is not None
        self._source, self._target = source._block.view, target._block.view

    def read(self, session: str, entries: Sequence[Entry], *, stall_s: float) -> None:
        for at, address, size in entries:
            self._target[at : at + size] = self._source[address : address + size]

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Asked:
    """A request on the decode engine, and what is held for it on the other until its prompt has come."""

    tokens: list[int]
    out: HandOut
    deltas: list[Delta] = field(default_factory=list)


class Pair:
    """An engine that computes prompts, and one that answers them."""

    def __init__(self, **decode: Any) -> None:
        there, here = SharedHost(), SharedHost()
        self.prefill = engine_for(there, device_memory="8MiB", host_memory="16MiB")
        self.decode = engine_for(here, sparse="dsa", **decode)
        poison_freed(self.decode)
        self._store = PeerStore(here, lambda: CopyLane(there, here), stall_s=PATIENCE_S)  # type: ignore[arg-type, return-value]
        self.decode.cache.store.attach(self._store, WAIT)
        self.decode.stores.append(self._store)
        self.open: dict[int, Asked] = {}

    def ask(self, tokens: list[int], count: int, **more: Any) -> Asked:
        self.prefill.submit(greedy(tokens, 1))
        run_to_the_end(self.prefill)
        settle(self.prefill.cache)
        out = self.prefill.cache.hand_out(tokens, ttl_s=600)
        assert out is not None
        (pages,) = self.prefill.cache.store.host_pages
        listing = listing_of(out, StoreWorker(MemoryStore(0), pages), pages.block, address=0, session="prefill")
        number = self.decode.submit(greedy(tokens, count, **more))
        self._store.add(str(number), "prefill", listing)
        self.open[number] = made = Asked(tokens, out)
        return made

    def run(self, most_open: int, before_each: Callable[[], None] = lambda: None) -> None:
        """Steps until no more are open than that. An offer ends with the first token of its answer, as a server ends it."""
        while self.decode.num_open > most_open:
            before_each()
            self._pass(most_open)
            self.decode.cache.audit()

    def _pass(self, most_open: int) -> None:
        before = self.decode.passes
        for delta in run_until(self.decode, lambda: self.decode.passes > before or self.decode.num_open <= most_open):
            self._take(delta)

    def _take(self, delta: Delta) -> None:
        assert delta.error is None, delta.error
        asked = self.open[delta.request]
        if delta.tokens and not tokens_of(asked.deltas):
            self._store.withdraw(str(delta.request))
            self.prefill.cache.pins.release(asked.out.pin)
        asked.deltas.append(delta)

    def close(self) -> None:
        """Nothing is left of anything."""
        assert self._store.num_offers == 0 and report(self.decode).hot_pages == 0
        for engine in (self.decode, self.prefill):
            settle(engine.cache)
            engine.cache.audit()
            engine.cache.flush()
            assert [engine.cache.stats().tier(tier).used_bytes for tier in (Tier.DEVICE, Tier.HOST)] == [0, 0]
            engine.close()


def check_answers(asked: Sequence[Asked], count: int) -> None:
    """Those of an engine that keeps everything on its device, alone."""
    with build_engine(short(checkpoint(FAMILY)), EngineConfig(**DEFAULTS)) as engine:
        for each in asked:
            engine.submit(greedy(each.tokens, count))
            assert tokens_of(each.deltas) == tokens_of(run_to_the_end(engine))


def some_prompts(count: int, seed: int) -> list[list[int]]:
    """Half of them share a beginning."""
    random = Random(seed)
    shared = prompt(5 * PAGE, seed=seed)
    return [
        [*(shared if at % 2 else ()), *prompt(random.randrange(60, 260), seed=100 * seed + at)] for at in range(count)
    ]  # fmt: skip


def usages_of(asked: Sequence[Asked]) -> list[Usage]:
    return [usage for each in asked if (usage := each.deltas[-1].usage) is not None]


def test_imports_that_go_on_and_on() -> None:
    """More prompts than device and host hold, four of them open at any time (vLLM 56699)."""
    pair = Pair(device_memory="700KiB", host_memory="1500KiB", hot_rows=2 * PAGE)
    asked = []
    for tokens in some_prompts(24, seed=1):
        asked.append(pair.ask(tokens, 10))
        pair.run(most_open=3)
    pair.run(most_open=0)
    check_answers(asked, 10)
    counters = pair.decode.cache.stats().counters
    assert counters["loaded_index_only_pages"] and counters["spilled_pages"] and counters["evicted_host_pages"] > 50
    assert report(pair.decode).misses and sum(usage.sources.store > 0 for usage in usages_of(asked)) >= 12
    pair.close()


def test_preempted_requests_whose_prompts_were_imported() -> None:
    """They go on from their own host, though what they had is offered no more (SGLang 40729)."""
    pair, random, retracted = Pair(device_memory="600KiB", host_memory="4MiB", hot_rows=2 * PAGE), Random(3), []
    asked = [pair.ask(tokens, 60) for tokens in some_prompts(6, seed=2)]
    scheduler, pages = pair.decode.scheduler, pair.decode.cache.row_pages
    assert pages is not None

    def retract() -> None:
        """Now and then one that has answered something, and of whose rows some are on the host alone."""
        some = [each for each in scheduler.active.values() if each.lease is not None and tokens_of(pair.open[each.id].deltas)]
        some = [each for each in some if each.lease is not None and pages.backed(each.lease.prefix_pages).any()]
        if some and random.random() < 0.1:
            retracted.append(random.choice(some))
            scheduler._preempt(retracted[-1])

    pair.run(most_open=0, before_each=retract)
    check_answers(asked, 60)
    assert len(retracted) > 3 and sum(usage.preemptions for usage in usages_of(asked)) >= len(retracted)
    assert pair.decode.cache.stats().counters["tokens_host"] > 0
    pair.close()
