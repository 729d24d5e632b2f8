"""A streamed answer as a client of the server meets it: its events one by one, and what its prompt was made of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

SOURCES = ("device", "host", "store", "computed")


class Refused(Exception):
    """An error that a server answered instead of, or in the middle of, an answer."""

    def __init__(self, says: str, *, status: int) -> None:
        super().__init__(says)
        self.status = status


async def events(http: httpx.AsyncClient, address: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Raises Refused, and what httpx raises. To leave in the middle, close it."""
    async with http.stream("POST", f"{address}/v1/completions", json=body) as response:
        if response.status_code != 200:
            says = (await response.aread())[:300].decode(errors="replace")
            raise Refused(f"{response.status_code}: {says}", status=response.status_code)
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data and data != "[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise Refused(event["error"]["message"], status=200)
                yield event


def sources_of(usage: dict[str, Any]) -> dict[str, int]:
    """Where a prompt's tokens came from."""
    found = {source: usage["prompt_tokens_details"][f"{source}_tokens"] for source in SOURCES[:-1]}
    return {**found, "computed": usage["prompt_tokens"] - sum(found.values())}
