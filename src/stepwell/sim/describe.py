"""Figures of a trace: number of requests, length of prompts, and the share that repeats. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from stepwell.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Figures of a whole trace."""

    requests: int
    sessions: int
    duration_s: float
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_p50: float
    prompt_tokens_p95: float
    prompt_tokens_max: int
    blocks: int
    distinct_blocks: int

    @property
    def repeated(self) -> float:
        """The share of blocks that were seen before: what endless memory could reuse."""
        return 1 - self.distinct_blocks / self.blocks if self.blocks else 0.0

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"repeated": self.repeated}


def describe(requests: Iterable[TraceRequest], *, block_tokens: int) -> Description:
    """Reads a trace once. Holds the name of every block."""
    lengths, outputs = array("q"), 0
    sessions: set[str] = set()
    seen: set[int] = set()
    blocks, first_s, last_s = 0, float("inf"), 0.0
    for request in requests:
        lengths.append(request.prompt_tokens)
        outputs += request.output_tokens
        blocks += len(request.blocks)
        seen.update(request.blocks.tolist())
        sessions.add(request.session)
        first_s, last_s = min(first_s, request.at_s), max(last_s, request.at_s)
    tokens = np.frombuffer(lengths, np.int64) if lengths else np.zeros(1, np.int64)
    p50, p95 = np.percentile(tokens, (50, 95)).tolist()
    return Description(
        requests=len(lengths),
        sessions=len(sessions - {""}),
        duration_s=max(last_s - first_s, 0.0),
        block_tokens=block_tokens,
        prompt_tokens=int(tokens.sum()),
        output_tokens=outputs,
        prompt_tokens_p50=p50,
        prompt_tokens_p95=p95,
        prompt_tokens_max=int(tokens.max()),
        blocks=blocks,
        distinct_blocks=len(seen),
    )
