"""Times Stepwell's prefix tree through the public cache: our half of `make bench-tree`.

Same workload, same columns and same arguments as `peers/sglang_tree.py`; prints one JSON line per prompt length.
An executor that does nothing stands in for copies, so that what is timed is the deciding.

    lookup_us               `cache.lookup` of a fully cached prompt, stored in chunks of 2,048 tokens
    lookup_one_node_us      the same, stored by one commit
    commit_new_us           `cache.commit` of a prompt the tree does not hold
    commit_known_us         `cache.commit` of a prompt that another request committed first
    evict_page_us           evict one page from a full tier, freeing included; the mean, all others are medians
    evict_many_us_per_page  evict many pages at once, per page
    collection_ms           the longest of a few full garbage collections with that tree in memory, in CPU time
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stepwell import (
    Cache,
    CacheConfig,
    Kind,
    Lease,
    ModelSpec,
    PlacementConfig,
    Point,
    Prefix,
    StateSpec,
    Tier,
    Window,
    build_cache,
)
from stepwell.base.tasks import Plan
from stepwell.cache.build import CacheTuning
from stepwell.jobs.executors import InlineCopyExecutor
from stepwell.tiers.eviction import make_room
from stepwell.transfer.copy_engine import Work
from stepwell.tree.node import LossReason, Node
from stepwell.tree.pruning import truncate

CHUNK_TOKENS = 2048
WINDOW_TOKENS = 1024
VOCABULARY = 1 << 17
PREFIX_PAGES, LEAF_PAGES, LEAVES_PER_FAMILY = 8, 2, 63
WARMUP_CALLS = 3
EVICTIONS = 200
COLLECTIONS = 5
PAGE_BYTES = 64  # of the smallest page that can be: the tree does not look at bytes

STATES = {
    "full": (),
    "window": (StateSpec(name="swa", shape=Window(tokens=WINDOW_TOKENS), layers=1, row_bytes=1, dtype="u8"),),
    "point": (StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=64, dtype="u8"),),
}

Tokens = npt.NDArray[np.int32]
Argument = TypeVar("Argument")


class NoCopyEngine:
    """Copies nothing."""

    def begin(self, plan: Plan) -> Work:
        return lambda: None


class Workload:
    """Draws random prompts, commits them, and keeps a forest of families in the tree."""

    def __init__(self, comps: str, page_tokens: int, device_pages: int, seed: int = 1) -> None:
        kv = StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=1, dtype="u8")
        spec = ModelSpec(name=f"bench-{comps}", states=(kv, *STATES[comps]), page_tokens=page_tokens)
        config = CacheConfig(device_bytes=device_pages * PAGE_BYTES, placement=PlacementConfig(interval_tokens=CHUNK_TOKENS))
        self.cache: Cache = build_cache(
            spec, config, executor=InlineCopyExecutor([NoCopyEngine()]), tuning=CacheTuning(page_alignment_bytes=PAGE_BYTES)
        )
        self.state = self.cache._state
        self.page_tokens = page_tokens
        self._forest: set[Node] = set()  # the first node of each family
        self._random = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> Tokens:
        return self._random.integers(VOCABULARY, size=num_tokens, dtype=np.int32)

    def lease(self, tokens: Tokens, upto: int) -> Lease:
        """A lease with pages for everything up to `upto`, ready to commit."""
        lease = self.cache.acquire(self.cache.lookup(tokens))
        self.settle(lease)
        self.cache.grow(lease, upto)
        return lease

    def settle(self, lease: Lease) -> None:
        while not lease.ready:
            self.cache.step()

    def store(self, tokens: Tokens, chunk_tokens: int) -> None:
        """Commits a prompt chunk by chunk, as chunked prefill does."""
        upto = len(tokens) - 1
        with self.lease(tokens, upto) as lease:
            for end in range(min(lease.position + chunk_tokens, upto), upto + 1, chunk_tokens):
                self.cache.commit(lease, end, last=end == upto)
                if end < upto:
                    self.settle(lease)
        self.cache.step()

    def plant(self, num_nodes: int) -> None:
        """Adds this many nodes: families of short leaves under a shared prefix."""
        page = self.page_tokens
        planted = 0
        while planted < num_nodes:
            prefix = self.draw(PREFIX_PAGES * page)
            for _ in range(min(LEAVES_PER_FAMILY, num_nodes - planted)):
                self.store(np.concatenate([prefix, self.draw(LEAF_PAGES * page + 1)]), CHUNK_TOKENS)
                planted += 1
            planted += 1
        self._forest = self._families()

    def forget_prompts(self) -> None:
        """Leaves nothing but the forest in the tree."""
        for node in self._families() - self._forest:
            truncate(self.state.tree, node, 0, self.state.loss(LossReason.CLEARED, Tier.DEVICE))

    def _families(self) -> set[Node]:
        return {node for root in self.state.tree.roots.values() if root.kids for node in root.kids.by_page.values()}

    def fill_up(self) -> None:
        """Takes all free pages, as the requests of a busy engine do."""
        arena = self.state.arena(Tier.DEVICE)
        for count in (1 << power for power in range(24, -1, -1)):
            while arena.fits({Kind.PREFIX: count}):
                arena.alloc({Kind.PREFIX: count})

    def evict(self, num_pages: int) -> None:
        """Evicts this many pages from a full tier."""
        assert make_room(self.state, Tier.DEVICE, {Kind.PREFIX: num_pages}).fits


def sample_us(
    call: Callable[[Argument], Any], reps: int, prepare: Callable[[], Argument], settle: Callable[[Argument], Any] = id
) -> list[float]:
    """How long each of `reps` calls took; `prepare` and `settle` run outside the clock."""
    samples = []
    gc.collect()
    gc.disable()
    for _ in range(WARMUP_CALLS + reps):
        argument = prepare()
        start_ns = time.perf_counter_ns()
        call(argument)
        samples.append((time.perf_counter_ns() - start_ns) / 1e3)
        settle(argument)
    gc.enable()
    return samples[WARMUP_CALLS:]


def median_us(
    call: Callable[[Argument], Any], reps: int, prepare: Callable[[], Argument], settle: Callable[[Argument], Any] = id
) -> float:
    return round(statistics.median(sample_us(call, reps, prepare, settle)), 1)


def measure_evictions(work: Workload, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Evictions from a full tier that holds a forest of `--nodes` nodes and nothing else, for every prompt length."""
    work.forget_prompts()
    work.fill_up()
    # The mean: with checkpoints some evictions cost twice what others do, and a median would show only one sort.
    single = round(statistics.mean(sample_us(work.evict, EVICTIONS, lambda: 1, lambda _: work.fill_up())), 1)
    at_most = args.nodes * LEAF_PAGES // (8 * (WARMUP_CALLS + 5))  # so that most of the forest stands to the end
    found = {}
    for length in args.lens:
        many = max(min(length // args.page, at_most), 1)
        per_page = median_us(work.evict, 5, lambda many=many: many, lambda _: work.fill_up()) / many
        many_tokens = many * args.page
        found[length] = {"evict_page_us": single, "evict_many_us_per_page": round(per_page, 2), "evict_many_tokens": many_tokens}
    return found


def _forest_pages(args: argparse.Namespace) -> int:
    per_node = {"full": 1, "window": 17, "point": 2}[args.comps]  # checkpoints take memory too
    families = args.nodes // LEAVES_PER_FAMILY + 2
    return int(args.nodes * LEAF_PAGES * per_node + families * PREFIX_PAGES * per_node)


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One forest for all: to plant it takes most of the time. Evictions come last, since they take it away."""
    prompts = (WARMUP_CALLS + args.reps) * 2 + 4
    work = Workload(args.comps, args.page, _forest_pages(args) + prompts * sum(args.lens) // args.page * 3 + 65536)
    work.plant(args.nodes)
    rows = [measure_prompts(work, length, args) for length in args.lens]
    collection_ms = measure_collections()
    evictions = measure_evictions(work, args)
    for length, row in zip(args.lens, rows, strict=True):
        yield row | evictions[length] | {"collection_ms": collection_ms}


def measure_collections() -> float:
    """How long a full collection stops every thread. CPU time: other processes do not count."""
    took_ns = []
    for _ in range(COLLECTIONS):
        start_ns = time.thread_time_ns()
        gc.collect()
        took_ns.append(time.thread_time_ns() - start_ns)
    return round(max(took_ns) / 1e6, 1)


def measure_prompts(work: Workload, length: int, args: argparse.Namespace) -> dict[str, object]:
    """Lookups and commits of prompts of one length, with the forest in the tree."""
    chain, whole = work.draw(length + 1), work.draw(length + 1)
    work.store(chain, CHUNK_TOKENS)
    work.store(whole, length)
    for prompt in (chain, whole):
        found = work.cache.lookup(prompt).restore_tokens
        assert found == length, f"{found=} {length=}"
    return {
        **{name: getattr(args, name) for name in ("comps", "page", "nodes", "reps")},
        "core": "stepwell", "length": length,
        "lookup_us": median_us(work.cache.lookup, args.reps, lambda: chain),
        "lookup_one_node_us": median_us(work.cache.lookup, args.reps, lambda: whole),
        **measure_commits(work, length, args.reps),
    }  # fmt: skip


def measure_commits(work: Workload, length: int, reps: int) -> dict[str, float]:
    def commit(lease: Lease) -> None:
        work.cache.commit(lease, length, last=True)

    new = median_us(commit, reps, lambda: work.lease(work.draw(length + 1), length), work.cache.release)
    known = work.draw(length + 1)
    waiting = [work.lease(known, length) for _ in range(WARMUP_CALLS + reps)]  # all saw an empty cache
    work.store(known, CHUNK_TOKENS)
    again = median_us(commit, reps, waiting.pop, work.cache.release)
    return {"commit_new_us": new, "commit_known_us": again}


def measure_memory(num_pages: int, page_tokens: int) -> dict[str, object]:
    """Bytes of bookkeeping a cached page costs, by the growth of this process: tokens, ids, nodes, counts, everything."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work = Workload("full", page_tokens, num_pages + 4096)
    shapes = itertools.cycle((2, 2, 4, 8, 16, 32))
    held = 0
    while held < num_pages:
        prefix = work.draw(PREFIX_PAGES * page_tokens)
        for pages in itertools.islice(shapes, LEAVES_PER_FAMILY):
            work.store(np.concatenate([prefix, work.draw(pages * page_tokens + 1)]), 1 << 30)
        held = work.state.arena(Tier.DEVICE).used_pages(Kind.PREFIX)
        if held + 1024 > num_pages:
            break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    nodes = sum(1 for _ in work.state.tree.nodes())
    return {"memory_pages": held, "memory_nodes": nodes, "bytes_per_page": round(grown / held, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time Stepwell's prefix tree.")
    parser.add_argument("--comps", choices=tuple(STATES), default="full")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--lens", type=int, nargs="+", default=[1024])
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--memory", type=int, metavar="PAGES", help="measure memory with this many pages instead")
    args = parser.parse_args()
    rows = [measure_memory(args.memory, args.page)] if args.memory else measure(args)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
