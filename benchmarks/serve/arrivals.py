"""Requests of synthetic agents and chats, scaled to a small model and a short time. Pure.

    trace       |b1|b2|b3|b4| tail |  at 812.4 s      32,000 tokens; other requests share some of its blocks
    arrival     |b1|b2|b3|b4| tail |  at 1.7 s         1,000 tokens; the same requests share as large a part

Lengths are scaled by one factor, so long prompts stay longer than short ones; times by another, so bursts stay bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from stepwell.sim.generate import Shape, generate
from stepwell.sim.trace import TraceRequest

_LETTERS = range(97, 123)  # tokens that every byte-level vocabulary has, and that say nothing
_AGENTS = 0.75  # of made-up sessions; the others are people who chat, with shorter prompts
_TURNS = 6  # of a session, about
_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for: `clients` that each ask `rate` times a second on average, for so long."""

    clients: int
    rate: float
    seconds: float
    longest: int  # tokens of the longest prompt
    answer_tokens: int  # of the longest answer
    leaving: float = 0.08  # share of clients that leave in the middle of an answer
    seed: int = 0

    @property
    def count(self) -> int:
        return max(round(self.clients * self.rate * self.seconds), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    at_s: float
    prompt: tuple[int, ...]
    answer_tokens: int
    leaves_after: int | None  # chunks; None to stay to the end


def made_up(load: Load) -> list[Arrival]:
    """Agents with tools and sub-agents, and some chats: sessions that return a few times in this time."""
    sessions = max(min(load.clients, load.count // _TURNS), 1)
    agents = max(round(sessions * _AGENTS), 1)
    found = generate("agents", Shape(sessions=agents, seed=load.seed, duration_s=60, block_tokens=_BLOCK_TOKENS))
    if sessions > agents:
        chats = generate("chat", Shape(sessions=sessions - agents, seed=load.seed, duration_s=60, block_tokens=_BLOCK_TOKENS))
        found = sorted([*found, *map(_elsewhere, chats)], key=lambda request: request.at_s)
    return scaled(found[: load.count], _BLOCK_TOKENS, load)


def scaled(requests: Sequence[TraceRequest], block_tokens: int, load: Load) -> list[Arrival]:
    """The same requests, shorter and sooner."""
    if not requests:
        return []
    shrink = min(load.longest / max(request.prompt_tokens for request in requests), 1.0)
    answers = min(load.answer_tokens / max(request.output_tokens for request in requests), 1.0)
    began, span = requests[0].at_s, max(requests[-1].at_s - requests[0].at_s, 1e-9)
    random = Random(f"{load.seed} leaving")
    found = []
    for number, request in enumerate(requests):
        answer = max(round(request.output_tokens * answers), 2)
        found.append(
            Arrival(
                at_s=(request.at_s - began) / span * load.seconds,
                prompt=_prompt(request, block_tokens, shrink, tail=f"{load.seed} tail {number}"),
                answer_tokens=answer,
                leaves_after=random.randrange(1, answer) if random.random() < load.leaving else None,
            )
        )
    return found


def _prompt(request: TraceRequest, block_tokens: int, shrink: float, *, tail: str) -> tuple[int, ...]:
    """As much of it is shared with others as of the request that it stands for, to a token a block."""
    size, length = max(round(block_tokens * shrink), 1), max(round(request.prompt_tokens * shrink), 1)
    tokens = [token for block in request.blocks for token in _letters(f"block {block}", size)]
    return tuple((tokens + _letters(tail, max(length - len(tokens), 0)))[:length])


def _letters(seed: str, count: int) -> list[int]:
    return Random(seed).choices(_LETTERS, k=count)


def _elsewhere(request: TraceRequest) -> TraceRequest:
    """With blocks that no agent has."""
    return TraceRequest(
        at_s=request.at_s, session=f"chat {request.session}", prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens, blocks=request.blocks + 2**40,
    )  # fmt: skip
