"""Times the prefix tree of SGLang: the peer's half of `make bench-tree`.

    .venv-sglang/bin/python benchmarks/peers/sglang_tree.py --core rust --comps full --nodes 1000

Standard output carries one line of JSON per prompt length and nothing else;
what SGLang prints goes to standard error. Times are medians in microseconds:

    lookup_us               a fully cached prompt, stored in chunks of 2,048 tokens
    lookup_indices_us       the same, and the device slots of the match
    lookup_one_node_us      a fully cached prompt, stored by one insert
    commit_new_us           one insert of a prompt the tree does not hold
    commit_known_us         one insert of a prompt it holds already
    evict_page_us           evict one page; SGLang evicts a whole leaf (evict_page_tokens)
    evict_many_us_per_page  evict evict_many_tokens in one call, per page evicted

Evictions run first, on a tree of `--nodes` nodes that is replenished after each one, and
include freeing the slots. evict_many_tokens is the prompt length, or half of the tree where
that is less. Window state is kept for every token of a prompt, so every lookup hits in full.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, TypeVar

import numpy as np
import sglang_shim
import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult
    from sglang_cache import SglangCache

WINDOW_TOKENS = 1024
CHUNK_TOKENS = 2048
VOCABULARY = 1 << 17
WARMUP_CALLS = 3

# The tree before any prompt is stored:
#
#   root -+- 8-page prefix -+- 2-page leaf   (63 of them)
#         |                 +- ...
#         +- 8-page prefix --- ...
PREFIX_PAGES = 8
LEAF_PAGES = 2
LEAVES_PER_FAMILY = 63
MIN_NODES = 4 * (1 + LEAVES_PER_FAMILY)

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Fact = TypeVar("Fact")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Tokens with the slots their pages occupy."""

    tokens: array[int]
    slots: torch.Tensor


class Workload:
    """Draws random prompts, stores them, and keeps a forest of families in the tree."""

    def __init__(self, cache: SglangCache, seed: int = 1) -> None:
        self.cache = cache
        self.forest_tokens = 0
        self._missing_tokens = 0
        self._random = np.random.default_rng(seed)
        self._planting = self._plant_families()

    def draw(self, num_tokens: int) -> Prompt:
        """A new prompt, with slots reserved for it."""
        tokens = array("q")
        tokens.frombytes(self._random.integers(VOCABULARY, size=num_tokens).tobytes())
        return Prompt(tokens=tokens, slots=self.cache.reserve_slots(num_tokens))

    def store(self, num_tokens: int, chunk_tokens: int) -> Prompt:
        """Store a new prompt chunk by chunk, as chunked prefill does."""
        prompt = self.draw(num_tokens)
        for start in range(0, num_tokens, chunk_tokens):
            end = min(start + chunk_tokens, num_tokens)
            state = self.cache.reserve_state()
            self.cache.insert(prompt.tokens[:end], prompt.slots[:end], state, start)
        return prompt

    def plant(self, num_nodes: int) -> None:
        """Grow the forest by this many nodes."""
        self.forest_tokens += sum(itertools.islice(self._planting, num_nodes))

    def replant(self, evicted_tokens: int) -> None:
        """Make up for an eviction with new nodes, to within one node's tokens over time."""
        self._missing_tokens += evicted_tokens
        while self._missing_tokens > 0:
            self._missing_tokens -= next(self._planting)

    def _plant_families(self) -> Iterator[int]:
        """Insert one node per step, family after family; yields the node's tokens."""
        page = self.cache.shape.page_tokens
        while True:
            prefix = self.store(PREFIX_PAGES * page, PREFIX_PAGES * page)
            yield len(prefix.tokens)
            for _ in range(LEAVES_PER_FAMILY):
                leaf = self.draw(LEAF_PAGES * page)
                slots = torch.cat([prefix.slots, leaf.slots])
                self.cache.insert(prefix.tokens + leaf.tokens, slots, self.cache.reserve_state(), len(prefix.tokens))
                yield len(leaf.tokens)


def timed(
    call: Callable[[Argument], Result],
    reps: int,
    prepare: Callable[[], Argument],
    settle: Callable[[Argument, Result], Fact],
) -> list[tuple[float, Fact]]:
    """Microseconds of each call, with what `settle` made of its result.

    `prepare` and `settle` run outside the clock. Results are dropped at once: keeping
    large ones would make the allocator fetch fresh memory for every call.
    """
    samples = []
    gc.collect()
    gc.disable()
    for _ in range(WARMUP_CALLS + reps):
        argument = prepare()
        start_ns = time.perf_counter_ns()
        result = call(argument)
        elapsed_us = (time.perf_counter_ns() - start_ns) / 1e3
        samples.append((elapsed_us, settle(argument, result)))
        del argument, result
    gc.enable()
    return samples[WARMUP_CALLS:]


def median_us(samples: list[tuple[float, Fact]]) -> float:
    """The median time of these samples, to a tenth of a microsecond."""
    return round(statistics.median(us for us, _ in samples), 1)


def measure_evictions(work: Workload, num_tokens: int, reps: int) -> dict[str, float]:
    """Evict one page's worth, then many pages at once; the tree is all forest so far."""
    page = work.cache.shape.page_tokens
    many_tokens = min(num_tokens, work.forest_tokens // 2 // page * page)

    def settle(_: int, evicted: int) -> int:
        work.replant(evicted)
        return evicted

    def evict(amount: int) -> list[tuple[float, int]]:
        return timed(work.cache.evict, reps, lambda: amount, settle)

    single, many = evict(page), evict(many_tokens)
    us_per_page = statistics.median(us * page / evicted for us, evicted in many)
    return {
        "evict_page_us": median_us(single),
        "evict_page_tokens": int(statistics.median(evicted for _, evicted in single)),
        "evict_many_us_per_page": round(us_per_page, 2),
        "evict_many_tokens": many_tokens,
    }


def measure_lookups(work: Workload, chain: Prompt, reps: int) -> dict[str, float]:
    """Look up a prompt stored as a chain of chunks, and one stored as one node."""
    cache, num_tokens = work.cache, len(chain.tokens)
    one_node = work.store(num_tokens, num_tokens)
    for prompt in (chain, one_node):
        hit_tokens = cache.lookup(prompt.tokens).device_prefix_len
        assert hit_tokens == num_tokens, f"{hit_tokens=} {num_tokens=}"

    def lookup_us(call: Callable[[array[int]], object], prompt: Prompt) -> float:
        return median_us(timed(call, reps, lambda: prompt.tokens, lambda _, match: None))

    return {
        "lookup_us": lookup_us(cache.lookup, chain),
        "lookup_indices_us": lookup_us(cache.lookup_indices, chain),
        "lookup_one_node_us": lookup_us(cache.lookup, one_node),
    }


def measure_commits(work: Workload, chain: Prompt, reps: int) -> dict[str, float]:
    """Insert new prompts, then insert the stored chain again."""
    cache, num_tokens = work.cache, len(chain.tokens)

    def settle_known(state: torch.Tensor | None, result: InsertResult) -> int:
        cache.release_unused_state(state, result)
        return result.prefix_len

    new = timed(
        lambda offer: cache.insert(offer[0].tokens, offer[0].slots, offer[1]),
        reps,
        lambda: (work.draw(num_tokens), cache.reserve_state()),
        lambda _, result: result.prefix_len,
    )
    known = timed(
        lambda state: cache.insert(chain.tokens, chain.slots, state, num_tokens), reps, cache.reserve_state, settle_known
    )
    assert all(found == 0 for _, found in new), "a new prompt was cached already"
    assert all(found == num_tokens for _, found in known), "a known prompt was lost"
    return {"commit_new_us": median_us(new), "commit_known_us": median_us(known)}


def build_workload(args: argparse.Namespace) -> Workload:
    """The cache with a forest of `--nodes` nodes, and pools large enough for every prompt."""
    from sglang_cache import CacheShape, SglangCache  # needs the shim first

    prompts_per_length = WARMUP_CALLS + args.reps + 2
    prompt_tokens = prompts_per_length * sum(args.lens)
    num_families = args.nodes // (1 + LEAVES_PER_FAMILY) + 2
    forest_pages = LEAF_PAGES * args.nodes + PREFIX_PAGES * num_families + 1024
    num_chunks = sum(-(-length // CHUNK_TOKENS) for length in args.lens)
    cache = SglangCache(
        CacheShape(
            core=args.core, comps=args.comps, page_tokens=args.page, window_tokens=WINDOW_TOKENS,
            pool_tokens=forest_pages * args.page + prompt_tokens,
            pool_states=2 * args.nodes + num_chunks + prompts_per_length * len(args.lens) + 1024,
        )
    )  # fmt: skip
    work = Workload(cache)
    start_s = time.perf_counter()
    work.plant(args.nodes)
    print(f"{args.core}, {args.comps}: {args.nodes:,} nodes in {time.perf_counter() - start_s:.1f} s", file=sys.stderr)
    return work


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row per prompt length."""
    work = build_workload(args)
    with work.cache.crowded():
        evictions = {length: measure_evictions(work, length, args.reps) for length in args.lens}
    for length in args.lens:
        chain = work.store(length, CHUNK_TOKENS)
        yield {
            **{name: getattr(args, name) for name in ("core", "comps", "page", "nodes", "reps")},
            "peer": f"sglang {work.cache.version}", "length": length, **measure_lookups(work, chain, args.reps),
            **measure_commits(work, chain, args.reps), **evictions[length],
        }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time SGLang's prefix tree on the CPU.")
    parser.add_argument("--core", choices=("rust", "python"), default="rust")
    parser.add_argument("--comps", choices=("full", "window", "point"), default="full")
    parser.add_argument("--nodes", type=int, default=1000, help="nodes in the tree")
    parser.add_argument("--lens", type=int, nargs="+", default=[1024, 8192, 65536, 262144])
    parser.add_argument("--page", type=int, default=64, help="tokens per page")
    parser.add_argument("--reps", type=int, default=20, help="timed calls behind each median")
    args = parser.parse_args()
    if args.nodes < MIN_NODES:
        parser.error(f"--nodes must be at least {MIN_NODES}, got {args.nodes}")
    for length in args.lens:
        if length <= 0 or length % args.page:
            parser.error(f"--lens must be multiples of --page ({args.page}), got {length}")
    return args


@contextmanager
def results_only_stdout() -> Iterator[TextIO]:
    """Standard output for our rows alone: whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        yield results


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    with results_only_stdout() as results:
        operators = sglang_shim.declare_box_operators()
        for row in measure(args):
            print(json.dumps(row), file=results, flush=True)
        del operators


if __name__ == "__main__":
    main()
