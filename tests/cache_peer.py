"""A process with a whole cache over a store, that serves prompts on request. Run by `processes.Peer`.

Its arguments: the options of the store, how long it waits for it (one of the values of `PrefetchPolicy`), and its name.

{"do": "serve", "prompt": 1, "tokens": 200}      -> where its tokens came from, and how long it waited for the store
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from stepwell import CacheConfig, ModelSpec, Point, Prefix, StateSpec, Tier, Window, build_cache
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.store.registry import open_store
from stepwell.store_tier.link import LinkState
from stepwell.testing import DigestEngine
from stepwell.transfer.copy_engine import NumpyCopyEngine

SPEC = ModelSpec(
    name="shared-hybrid",
    page_tokens=16,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=4, row_bytes=256, dtype="u8"),
        StateSpec(name="swa", shape=Window(tokens=32), layers=2, row_bytes=128, dtype="u8"),
        StateSpec(name="ssm", shape=Point(), layers=2, row_bytes=4096, dtype="u8"),
    ),
)
PATIENCE_S, PAUSE_S = 180.0, 0.0005
CONFIG = CacheConfig(device_bytes=4 * 2**20, host_bytes=4 * 2**20)


class Server:
    """A cache, its store, and a model whose bytes are digests: what it restores is checked."""

    def __init__(self, where: str, options: dict[str, str], policy: PrefetchPolicy) -> None:
        memories = numpy_memories(SPEC, layouts_for(SPEC, CONFIG))
        self.engine = DigestEngine(SPEC, [memories])
        executor = ThreadCopyExecutor([NumpyCopyEngine(memories)])
        self.cache = build_cache(
            SPEC, CONFIG, executor=executor, on_free=self.engine.poison, model="digests", host_pages=[memories[Tier.HOST]]
        )
        store = open_store(where, options=options)
        worth_it = 1.0 if policy is PrefetchPolicy.WAIT_COMPLETE else None  # else as measured
        self.cache.store.attach(store, StoreConfig(prefetch=policy, recompute_tokens_per_s=worth_it))

    def serve(self, prompt: list[int]) -> dict[str, Any]:
        cache, started_s = self.cache, time.monotonic()
        ticket = cache.prefetch(cache.lookup(prompt))
        self._until(lambda: ticket.ready)
        waited_s = time.monotonic() - started_s
        with cache.acquire(cache.lookup(prompt), ticket=ticket) as lease:
            self._until(lambda: lease.ready)
            self.engine.check(lease)
            while lease.position < len(prompt):
                upto = min(cache.next_stop(lease) or len(prompt), len(prompt))
                cache.grow(lease, upto)
                self.engine.compute(lease, upto)
                cache.commit(lease, upto)
                self._until(lambda: lease.ready)
        self._until(self._is_quiet)
        cache.audit()
        return {**asdict(lease.sources), "waited_s": waited_s, "store": lease.sources.store, "state": cache.store.state.name}

    def _is_quiet(self) -> bool:
        """Copies are made, and the store has what it can have; one that is switched off is not waited for."""
        report = self.cache.step()
        return not report.running and (not report.storing or self.cache.store.state is LinkState.SWITCHED_OFF)

    def _until(self, done: Any) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not done():
            self.cache.step()
            assert time.monotonic() < deadline_s, "it never came to an end"
            time.sleep(PAUSE_S)  # for the threads that copy


def main() -> None:
    server = Server(sys.argv[3], json.loads(sys.argv[1]), PrefetchPolicy(sys.argv[2]))
    answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        answer(server.serve([order["prompt"] * 10_000 + index for index in range(order["tokens"])]))


def answer(words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
