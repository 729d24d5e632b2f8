"""Pages handed over by one server to another, beside Mooncake's transfer engine alone, which moves the same bytes.

Handed over: as the cache fetches them, through the lane's own process, every page verified on arrival. Raw: one engine in this
process, `batch_transfer_sync_read` of at most 1,024 entries, nothing verified. Taken in turns; the median counts.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

from stepwell import Kind
from stepwell.cli.demo_cluster.private_network import HOST
from stepwell.store.peer.engine_process import MAX_ENTRIES
from stepwell.store.peer.lane import BATCH_BYTES, Lane, SharedHost, Shown, Wire
from stepwell.store.peer.listing import Listing, Value
from stepwell.store.peer.store import PeerStore
from stepwell.store.seal import seal
from store.load import Load, make_load, timed
from store.stepwell_log import Driver

SETS = ((36 << 10, 8), (256 << 10, 4), (2560 << 10, 1))  # bytes of a page, and how many times 128 of them
ROUNDS = 5


def run() -> dict[str, Any]:
    """GB/s by size of page, and the lowest share of raw."""
    rows = {f"{page_bytes >> 10} KiB": _compare(page_bytes, batches) for page_bytes, batches in SETS}
    return rows | {"lowest share of raw": min(row["share of raw"] for row in rows.values())}


def _compare(page_bytes: int, batches: int) -> dict[str, float]:
    wire = Wire(host=HOST)
    with ExitStack() as stack:
        host = SharedHost()
        load = make_load(page_bytes, batches, lambda size: host.make(size).view)
        shown = Shown(host, wire)
        stack.callback(shown.close)
        store = PeerStore(host, partial(Lane, host, wire))
        store.register([load.memory.block])
        driver = Driver(store, load)
        stack.callback(driver.close)
        store.add("offer", "prefill", _listing(load, driver, shown))
        engine: Any = import_module("mooncake.engine").TransferEngine()
        assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        ours, raw = [], []
        for number in range(ROUNDS + 1):  # the first opens connections
            load.forget_targets()
            handed_s = timed(lambda: driver.read(0)).wall_s
            load.check_targets()
            load.forget_targets()
            raw_s = timed(lambda: _read_raw(engine, load, shown)).wall_s
            load.check_targets()
            if number:
                ours.append(load.total_bytes / handed_s / 1e9)
                raw.append(load.total_bytes / raw_s / 1e9)
    shares = [a / b for a, b in zip(ours, raw, strict=True)]
    return {
        "handed over GB/s": statistics.median(ours),
        "raw GB/s": statistics.median(raw),
        "share of raw": statistics.median(shares),
    }


def _listing(load: Load, driver: Driver, shown: Shown) -> Listing:
    stride = load.memory.rows(Kind.PREFIX).strides[0]
    values = [
        Value(key, seal(driver.space, key, load.source(at)), shown.address + at * stride, load.value_bytes)
        for at, key in enumerate(load.keys(0))
    ]
    return Listing(space=driver.space.digest, session=shown.session, values=values)


def _read_raw(engine: Any, load: Load, shown: Shown) -> None:
    rows = load.memory.rows(Kind.PREFIX)
    here, stride = int(rows.__array_interface__["data"][0]), rows.strides[0]
    step = min(MAX_ENTRIES, BATCH_BYTES // load.value_bytes)
    for first in range(0, load.count, step):
        pages = range(first, min(first + step, load.count))
        targets = [here + (load.count + page) * stride for page in pages]
        sources = [shown.address + page * stride for page in pages]
        sizes = [load.value_bytes] * len(pages)
        assert engine.batch_transfer_sync_read(shown.session, targets, sources, sizes) == 0
