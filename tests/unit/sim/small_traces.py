"""Small traces, and what a brute-force count says of them. Slow and plain on purpose: it shares nothing with the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from stepwell.base.config import CacheConfig
from stepwell.base.spec import ModelSpec
from stepwell.policy.placement import PlacementRules
from stepwell.sim.policies import LeastRecent
from stepwell.sim.setup import Setup
from stepwell.sim.trace import TraceRequest
from toys import FULL, OBJECT_BYTES, SMALL_PAGES

BLOCK = 4  # the toys' page
END_ONLY = PlacementRules(interval_tokens=0, most_added=None, decode_interval_tokens=0, at_branch=False)


@dataclass(frozen=True, kw_only=True)
class ListTrace:
    """A trace in memory."""

    requests: Sequence[TraceRequest]
    name: str = "listed"
    block_tokens: int = BLOCK

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


def request(at_s: float, blocks: Sequence[int], *, tail: int = 1, out: int = 0) -> TraceRequest:
    return TraceRequest(
        at_s=at_s, session="", prompt_tokens=len(blocks) * BLOCK + tail, output_tokens=out, blocks=np.array(blocks, np.int64)
    )


def branching(num_requests: int, *, seed: int, tails: Sequence[int] = (1, 2, 3)) -> list[TraceRequest]:
    """Requests that go on from, or leave, earlier ones: ids are new wherever a path is."""
    random, fresh, paths, requests = Random(seed), 0, [[]], []
    for number in range(num_requests):
        base = random.choice(paths[-12:])
        kept = base[: random.randint(0, len(base))] if random.random() < 0.5 else base
        added = random.randint(0 if kept else 1, 5)
        path = [*kept, *range(fresh, fresh + added)][:24]
        fresh += added
        paths.append(path)
        requests.append(request(float(number), path, tail=random.choice(tails)))
    return requests


def setup(spec: ModelSpec = FULL, *, device_pages: int, host_pages: int | None = None, **changes: object) -> Setup:
    host_bytes = None if host_pages is None else host_pages * OBJECT_BYTES
    names = ("eviction", "placement")
    rival = {"eviction": LeastRecent(), "placement": END_ONLY} | {name: changes.pop(name) for name in names if name in changes}
    write = {"write": changes.pop("write")} if "write" in changes else {}
    config = CacheConfig(device_bytes=device_pages * OBJECT_BYTES, host_bytes=host_bytes, **write)  # type: ignore[arg-type]
    return Setup(spec=spec, config=config, tuning=replace(SMALL_PAGES, **rival), **changes)  # type: ignore[arg-type]


def lru_resumed(requests: Sequence[TraceRequest], capacity: int) -> list[int]:
    """Pages each request resumes, when pages are given up by last use, the deepest of a request first."""
    used: dict[tuple[int, ...], int] = {}
    resumed = []
    for number, each in enumerate(requests):
        path = each.blocks.tolist()
        pages = [tuple(path[: depth + 1]) for depth in range(len(path))]
        hits = next((depth for depth, page in enumerate(pages) if page not in used), len(pages))
        resumed.append(hits)
        for page in pages[:hits]:
            used[page] = number
        while len(used) + len(path) + 1 - hits > capacity:  # a page for the tail too
            del used[min((page for page in used if used[page] < number), key=lambda page: (used[page], -len(page)))]
        used |= dict.fromkeys(pages, number)
    return resumed


def checkpointed_resumed(requests: Sequence[TraceRequest]) -> list[int]:
    """Pages each request resumes with endless memory and a checkpoint at the end of every prompt."""
    ends: set[tuple[int, ...]] = set()
    resumed = []
    for each in requests:
        path = tuple(each.blocks.tolist())
        resumed.append(max((depth for depth in range(1, len(path) + 1) if path[:depth] in ends), default=0))
        ends.add(path)
    return resumed


def distinct_pages(requests: Sequence[TraceRequest]) -> int:
    return len({page for each in requests for page in each.blocks.tolist()})
