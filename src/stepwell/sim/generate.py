"""Synthetic traces from a seed: chats, agents with tools and sub-agents, and questions about documents. Pure.

Blocks are numbered when they are first written, so two requests share a block exactly where they share its text.

    chat      | shared system prompt | turn 1 | turn 2 | ...                        a person's turns, minutes apart
    agents    | shared tools | task | step | step | ...                             seconds apart; some steps ask a sub-agent,
              | shared tools of sub-agents | its task | step | ...                  whose own prompt starts anew
    rag       | shared system prompt | one of many documents | question |           popular documents more often
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

import numpy as np

from stepwell.base.errors import ConfigError
from stepwell.sim.trace import TraceRequest

SHARED_PROMPTS = 4  # system prompts, or sets of tools, that sessions choose from
DOCUMENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a generated trace is. Sessions begin at random within `duration_s`."""

    sessions: int = 100
    seed: int = 0
    duration_s: float = 3600.0
    block_tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.sessions <= 10**6:
            raise ConfigError(f"sessions must be 1 to 1,000,000, got {self.sessions}")
        if not 0 < self.duration_s <= 1e9:
            raise ConfigError(f"duration_s must be positive and at most 1e9, got {self.duration_s}")
        if not 2 <= self.block_tokens <= 2**16:
            raise ConfigError(f"block_tokens must be 2 to 65,536, got {self.block_tokens}")


class _Writer:
    """Makes new blocks, and requests from them."""

    def __init__(self, shape: Shape) -> None:
        self.random = Random(shape.seed)
        self._block_tokens = shape.block_tokens
        self._next = 0

    def text(self, tokens: int) -> list[int]:
        """New text of about `tokens` tokens, in whole blocks."""
        blocks = max(round(tokens * self.random.uniform(0.5, 1.5) / self._block_tokens), 1)
        self._next += blocks
        return list(range(self._next - blocks, self._next))

    def request(self, at_s: float, session: str, blocks: list[int], output_tokens: int) -> TraceRequest:
        tail = self.random.randrange(1, self._block_tokens)
        return TraceRequest(
            at_s=at_s,
            session=session,
            prompt_tokens=len(blocks) * self._block_tokens + tail,
            output_tokens=max(round(output_tokens * self.random.uniform(0.3, 1.7)), 1),
            blocks=np.array(blocks, np.int64),
        )


def generate(kind: str, shape: Shape) -> list[TraceRequest]:
    """A trace of one of `KINDS`, by time. The same shape gives the same trace. Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"no kind of trace is called {kind!r:.40}; there are {', '.join(KINDS)}")
    return sorted(KINDS[kind](shape), key=lambda request: request.at_s)


def _chats(shape: Shape) -> Iterator[TraceRequest]:
    writer = _Writer(shape)
    systems = [writer.text(2000) for _ in range(SHARED_PROMPTS)]
    for session in range(shape.sessions):
        blocks = list(writer.random.choice(systems))
        at_s = writer.random.uniform(0, shape.duration_s)
        for _ in range(writer.random.randint(1, 12)):
            blocks += writer.text(200)
            yield writer.request(at_s, str(session), blocks, 300)
            blocks += writer.text(300)  # the answer, as the next prompt has it
            at_s += writer.random.expovariate(1 / 90)


def _agents(shape: Shape) -> Iterator[TraceRequest]:
    writer = _Writer(shape)
    tools = [writer.text(12_000) for _ in range(SHARED_PROMPTS)]
    sub_tools = [writer.text(4000) for _ in range(SHARED_PROMPTS)]
    for session in range(shape.sessions):
        blocks = writer.random.choice(tools) + writer.text(1500)
        at_s = writer.random.uniform(0, shape.duration_s)
        for _ in range(writer.random.randint(5, 60)):
            yield writer.request(at_s, str(session), blocks, 250)
            at_s += writer.random.expovariate(1 / 15)
            if writer.random.random() < 0.1:
                for asked in _sub_agent(writer, sub_tools, at_s, str(session)):
                    at_s = asked.at_s
                    yield asked
            blocks += writer.text(1200)  # its call and the tool's result


def _sub_agent(writer: _Writer, tools: list[list[int]], at_s: float, session: str) -> Iterator[TraceRequest]:
    blocks = writer.random.choice(tools) + writer.text(800)
    for _ in range(writer.random.randint(2, 10)):
        yield writer.request(at_s, f"{session}/sub", blocks, 200)
        at_s += writer.random.expovariate(1 / 8)
        blocks += writer.text(1500)


def _rag(shape: Shape) -> Iterator[TraceRequest]:
    writer = _Writer(shape)
    system = writer.text(1000)
    documents = [writer.text(8000) for _ in range(DOCUMENTS)]
    weights = [1 / rank for rank, _ in zip(count(1), documents, strict=False)]  # Zipf's law
    for session in range(shape.sessions):
        at_s = writer.random.uniform(0, shape.duration_s)
        (document,) = writer.random.choices(documents, weights)
        yield writer.request(at_s, str(session), system + document + writer.text(100), 150)


KINDS: Mapping[str, Callable[[Shape], Iterator[TraceRequest]]] = {"chat": _chats, "agents": _agents, "rag": _rag}
