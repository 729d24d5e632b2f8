"""Two engines in one process; one reads the other's host memory through real transfer engines."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from demo_cluster.private_network import HOST
from parity.recorded import Played, Recorded
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.store.memory import MemoryStore
from stepwell.store.peer.lane import Lane, SharedHost, Shown, Wire
from stepwell.store.peer.listing import parse
from stepwell.store.peer.store import PeerStore
from stepwell.store_tier.hand_out import HandOut, listing_of
from stepwell.transfer.store_worker import StoreWorker
from waiting import PATIENCE_S

WIRE = Wire(host=HOST)
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0)  # however busy the machine is


class Prefill:
    """An engine that hands out what it computed."""

    def __init__(self, stack: ExitStack, family: str | Checkpoint, **settings: Any) -> None:
        host = SharedHost()
        self.recorded = Recorded(family, host_block=host.make, **settings)
        stack.callback(self.recorded.close)
        self.shown = Shown(host, WIRE)
        stack.callback(self.shown.close)

    def compute(self, prompt: list[int], *, ttl_s: float = 600.0) -> HandOut:
        self.recorded.play(prompt, answer=1)
        self.recorded.settle()
        out = self.recorded.engine.cache.hand_out(prompt, ttl_s=ttl_s)
        assert out is not None
        return out

    def listing(self, out: HandOut) -> bytes:
        (pages,) = self.recorded.engine.cache.store.host_pages
        worker = StoreWorker(MemoryStore(0), pages)
        return listing_of(out, worker, pages.block, address=self.shown.address, session=self.shown.session).pack()


class Decode:
    """An engine that reads what others hand out."""

    def __init__(self, stack: ExitStack, family: str | Checkpoint, *, stall_s: float = PATIENCE_S, **settings: Any) -> None:
        host = SharedHost()
        self.recorded = Recorded(family, host_block=host.make, **settings)
        stack.callback(self.recorded.close)
        self.store = PeerStore(host, partial(Lane, host, WIRE), stall_s=stall_s)
        self.recorded.engine.cache.store.attach(self.store, WAIT)
        self.recorded.engine.stores.append(self.store)
        self._last = 0

    def play(self, prompt: list[int], listing: bytes) -> Played:
        self._last += 1
        self.store.add(str(self._last), "prefill", parse(listing))
        try:
            return self.recorded.play(prompt)
        finally:
            self.store.withdraw(str(self._last))
            self.recorded.engine.cache.audit()

    @property
    def counters(self) -> dict[str, int]:
        return self.recorded.engine.cache.counters.snapshot()
