"""What every route knows: the engine's loop, the model's name, its tokenizer and template, and who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stepwell.engine.engine import Engine
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loop import EngineLoop
from stepwell.engine.server.errors import ApiError
from stepwell.engine.server.metrics import Metrics
from stepwell.engine.textual import Text

T = TypeVar("T")

MAX_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Who may do what. `api_key` None: whoever can connect may ask."""

    api_key: str | None
    admin_token: str

    def __repr__(self) -> str:
        return "Secrets(...)"  # which are not for logs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """One model behind one server. `defaults` are sampling settings for requests that name none."""

    loop: EngineLoop
    name: str
    text: Text | None
    chat: ChatTemplate
    max_context: int
    metrics: Metrics
    secrets: Secrets
    defaults: Mapping[str, float | int | bool] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    hosts: tuple[str, ...] = ()  # names it goes by; none for any

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Runs `work` on the engine's thread, between two passes."""
        return await asyncio.wrap_future(self.loop.call(work))

    def encode(self, text: str, *, param: str) -> list[int]:
        if self.text is None:
            raise ApiError(400, "this model has no tokenizer: give token ids as the prompt of /v1/completions", param=param)
        return self.text.encode(text)

    def must_fit(self, tokens: list[int], *, max_tokens: int | None, param: str) -> None:
        """Raises ApiError for a prompt that is empty, or too long with the answer that is wanted."""
        if not tokens:
            raise ApiError(400, "the prompt is empty: there is nothing to go on from", param=param)
        if len(tokens) + (max_tokens or 1) > self.max_context:
            raise ApiError(
                400,
                f"{len(tokens)} prompt tokens and {max_tokens or 1} to come exceed the {self.max_context} that this server can "
                f"hold; shorten the prompt or ask for less",
                param=param,
                code="context_length_exceeded",
            )
