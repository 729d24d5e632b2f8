"""How many bytes a session of a trace keeps alive: the pages of its longest prompt, and one checkpoint at its end. Pure.

    session    the requests that name the same one. Where a trace names none: each prompt that no other continues
    path       of its longest prompt, whole pages, counted as if other sessions shared none of them
    checkpoint one, at the last boundary: what the next request would resume from

So the counts are too low where sessions share a long system prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """The sessions of a trace, by the length of their longest prompts."""

    requests: int
    sessions: int
    named: bool  # by the trace; else they are its last prompts
    median_tokens: int
    p95_tokens: int
    median_bytes: int  # on the device
    p95_bytes: int
    cached_median_bytes: int  # below it
    cached_p95_bytes: int

    def fitting(self, tier: Tier, size_bytes: int) -> tuple[int, int]:
        """How many fit into `size_bytes` of a tier if all were like the median one, and if all were like the 95th percentile."""
        on_device = tier is Tier.DEVICE
        median = self.median_bytes if on_device else self.cached_median_bytes
        p95 = self.p95_bytes if on_device else self.cached_p95_bytes
        return size_bytes // max(median, 1), size_bytes // max(p95, 1)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def sessions_of(requests: Iterable[TraceRequest], spec: ModelSpec, *, block_tokens: int) -> Sessions:
    """Reads a trace once. Remembers the name of every block where it names no sessions."""
    count = 0
    longest: dict[str, int] = {}
    ends: dict[int, int] = {}  # longest prompt by its last whole block
    inner: set[int] = set()  # blocks that a prompt continues
    for request in requests:
        count += 1
        if request.session:
            longest[request.session] = max(request.prompt_tokens, longest.get(request.session, 0))
        else:
            whole = min(len(request.blocks), request.prompt_tokens // block_tokens)
            path = request.blocks[:whole].tolist() or [-count]  # shorter than a block: a session of its own
            inner.update(path[:-1])
            ends[path[-1]] = max(request.prompt_tokens, ends.get(path[-1], 0))
    lengths = sorted([*longest.values(), *(tokens for block, tokens in ends.items() if block not in inner)])
    median, p95 = np.percentile(lengths, (50, 95), method="higher").astype(int).tolist() if lengths else (0, 0)
    exact = spec.with_checkpoint_dtype(None)
    return Sessions(
        requests=count,
        sessions=len(lengths),
        named=bool(longest),
        median_tokens=median,
        p95_tokens=p95,
        median_bytes=session_bytes(exact, median),
        p95_bytes=session_bytes(exact, p95),
        cached_median_bytes=session_bytes(spec, median),
        cached_p95_bytes=session_bytes(spec, p95),
    )


def session_bytes(spec: ModelSpec, prompt_tokens: int) -> int:
    """Bytes below the device of a path of `prompt_tokens` with one checkpoint at its last boundary."""
    end = spec.usable(prompt_tokens)
    checkpoint = spec.checkpoint_bytes(end) if spec.needs_checkpoint and spec.needs_checkpoint_at(end) else 0
    return prompt_tokens // spec.page_tokens * spec.object_bytes(Kind.PREFIX) + checkpoint
