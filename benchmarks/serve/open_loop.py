"""Sends requests when they are due, whatever came of those before, and notes what each client heard and when.

Times count from when a request was due, not from when it was sent: a server that is behind cannot make its clients ask later.
Late sending is reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve.arrivals import Arrival
from serve.streaming import Refused, events, sources_of

PATIENCE_S = 600.0


@dataclass(kw_only=True)
class Heard:
    """What one client heard. `outcome`: done, left, refused (the server said no), failed (it did not say anything)."""

    arrival: int  # its number in the load
    late_s: float  # that it was sent
    outcome: str = "failed"
    chunks_s: list[float] = field(default_factory=list)  # after it was due
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A part of a load, from its first arrival to its last answer."""

    seconds: float
    heard: tuple[Heard, ...]


async def play(http: httpx.AsyncClient, address: str, arrivals: Sequence[tuple[int, Arrival]], more: dict[str, Any]) -> Played:
    """Numbered arrivals, the first of them now. `more` are fields of every body. Returns when all have ended."""
    if not arrivals:
        return Played(seconds=0.0, heard=())
    began = time.perf_counter()
    asked = []
    for number, arrival in arrivals:
        due = began + arrival.at_s - arrivals[0][1].at_s
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        asked.append(asyncio.create_task(_ask(http, address, number, arrival, due, more)))
    heard = await asyncio.gather(*asked)
    return Played(seconds=time.perf_counter() - began, heard=tuple(heard))


async def _ask(
    http: httpx.AsyncClient, address: str, number: int, arrival: Arrival, due: float, more: dict[str, Any]
) -> Heard:  # fmt: skip
    body = {
        "model": "bench", "prompt": list(arrival.prompt), "max_tokens": arrival.answer_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    heard = Heard(arrival=number, late_s=time.perf_counter() - due)
    try:
        await _hear(http, address, body, arrival, heard, due)
    except Refused as error:
        heard.outcome, heard.error = "refused" if error.status != 200 else "failed", str(error)
    except httpx.HTTPError as error:
        heard.error = f"{type(error).__name__}: {error}"
    heard.ended_s = time.perf_counter() - due
    return heard


async def _hear(
    http: httpx.AsyncClient, address: str, body: dict[str, Any], arrival: Arrival, heard: Heard, due: float
) -> None:  # fmt: skip
    async with aclosing(events(http, address, body)) as chunks:
        async for chunk in chunks:
            text = "".join(choice["text"] for choice in chunk["choices"])
            if text:
                heard.chunks_s.append(time.perf_counter() - due)
                heard.text += text
            if arrival.leaves_after is not None and len(heard.chunks_s) >= arrival.leaves_after:
                heard.outcome = "left"
                return
            if chunk.get("usage"):
                heard.sources = sources_of(chunk["usage"])
                heard.prompt_tokens, heard.answer_tokens = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
                heard.outcome = "done"


def client() -> httpx.AsyncClient:
    """For as many streams at once as there are arrivals."""
    return httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None), trust_env=False)
