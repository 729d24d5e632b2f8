"""What every route needs: the engine's loop, the model's name, its tokenizer and template, and the principals."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from stepwell.base.errors import BadTokens
from stepwell.base.meters import Clock
from stepwell.engine.engine import Engine
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.guided import Guides
from stepwell.engine.requests.text import Text
from stepwell.server.access.tenants import Principals
from stepwell.server.ahead import PartSender
from stepwell.server.errors import ApiError
from stepwell.server.handover import Offers, Peers
from stepwell.server.monitoring.activity import History, LoadMeter
from stepwell.server.monitoring.metrics import Metrics
from stepwell.server.monitoring.progress import Progress

if TYPE_CHECKING:
    from stepwell.server.monitoring.tracing import Traces

T = TypeVar("T")

MAX_BODY_BYTES = 32 * 2**20
MAX_CHOICES = 64  # completions of one request
LARGE_BYTES = 1 << 20  # larger bodies are parsed and tokenized a few at a time
_OTHER_VALUES = 250_000  # values of a body other than token ids
_LARGE_AT_ONCE = 2  # fewer than the threads, so that small bodies find one
_COMPILING_AT_ONCE, _COMPILING_EACH = 4, 2  # requests compiling a grammar: in total, and per tenant


def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COMPILING_AT_ONCE, thread_name_prefix="stepwell-grammars")


def _gates() -> defaultdict[str | None, asyncio.Semaphore]:
    return defaultdict(lambda: asyncio.Semaphore(_COMPILING_EACH))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """One model behind one server. `defaults` are sampling settings for requests without their own.

    `open_metrics` opens `/metrics` and `/v1/loads` to clients without a key.
    """

    loop: EngineLoop
    name: str
    text: Text | None
    chat: ChatTemplate
    max_context: int
    metrics: Metrics
    progress: Progress
    load: LoadMeter
    history: History
    principals: Principals
    clock: Clock
    aliases: tuple[str, ...] = ()  # other names of the model
    default_max_tokens: int | None = None  # for requests without max_tokens
    request_timeout_s: float | None = None  # from arrival to the end
    guides: Guides | None = None  # None for models without a tokenizer
    tool_parser: str | None = None  # format of the model's tool calls; None if unknown
    reasoning_parser: str | None = None
    defaults: Mapping[str, float | int | bool] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    hosts: tuple[str, ...] = ()  # accepted Host headers; empty for any
    open_metrics: bool = False
    hide_version: bool = False  # no `/version`: routers take a server with one for vLLM
    offers: Offers | None = None  # a prefill server
    ahead: PartSender | None = None  # a prefill server with --peer
    peers: Peers | None = None  # a decode server
    traces: Traces | None = None  # None without tracing
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_AT_ONCE))
    compilers: ThreadPoolExecutor = field(default_factory=_compilers)
    compiling: defaultdict[str | None, asyncio.Semaphore] = field(default_factory=_gates)  # by tenant

    @property
    def max_values(self) -> int:
        """The most values a body may hold: token ids of MAX_CHOICES prompts, and other values."""
        return MAX_CHOICES * self.max_context + _OTHER_VALUES

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Runs `work` on the engine's thread, between two passes."""
        return await asyncio.wrap_future(self.loop.call(work))

    async def run_in_thread(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs work for a body of `size_bytes` on a thread. Large bodies queue, so that small ones need not wait."""
        async with self._turn(size_bytes):
            return await asyncio.to_thread(work)

    async def compile_in_thread(self, size_bytes: int, tenant: str | None, work: Callable[[], T]) -> T:
        """The same for work that may compile a grammar. A tenant with many of them waits only for its own."""
        async with self.compiling[tenant], self._turn(size_bytes):
            return await asyncio.get_running_loop().run_in_executor(self.compilers, work)

    @asynccontextmanager
    async def _turn(self, size_bytes: int) -> AsyncIterator[None]:
        if size_bytes <= LARGE_BYTES:
            yield
            return
        async with self.large:
            yield

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def time_left_s(self, arrived_s: float) -> float | None:
        """Seconds until a request times out, at least 0; None without a timeout."""
        return None if self.request_timeout_s is None else max(arrived_s + self.request_timeout_s - self.clock.now(), 0.0)

    def response_name(self, name: str | None) -> str:
        """The model's name for the response: the one in the request. Raises ApiError for an unknown name."""
        if name is None:
            return self.name
        if name not in self.names:
            message = f"there is no model {name!r:.200} here; this server has {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def encode(self, text: str, *, param: str, special: bool = True) -> list[int]:
        """Raises ApiError for text that cannot be encoded, or is far too long. Slow."""
        if self.text is None:
            raise ApiError(400, "this model has no tokenizer: give token ids as the prompt of /v1/completions", param=param)
        try:
            if self.text.exceeds(text, self.max_context):
                raise self._too_long(f"{len(text)} characters are more tokens than", param)
            return self.text.encode(text, special=special)
        except BadTokens as error:
            raise ApiError(400, str(error), param=param) from None

    def decode(self, tokens: Sequence[int], *, param: str, special: bool = False) -> str:
        """Raises ApiError for ids that are not in the vocabulary. Slow."""
        if self.text is None:
            raise ApiError(400, "this model has no tokenizer", param=param)
        unknown = self.text.unknown(tokens)
        if unknown is not None:
            raise ApiError(400, f"{param} must be ids of the vocabulary, which has no token {unknown!s:.20}", param=param)
        return self.text.decode(tokens, special=special)

    def must_fit(self, tokens: list[int], *, max_tokens: int | None, param: str) -> None:
        """Raises ApiError for a prompt that is empty, or too long together with max_tokens."""
        if not tokens:
            raise ApiError(400, "the prompt is empty", param=param)
        if len(tokens) + (max_tokens or 1) > self.max_context:
            raise self._too_long(f"{len(tokens)} prompt tokens and {max_tokens or 1} to generate exceed", param)

    def _too_long(self, what: str, param: str) -> ApiError:
        message = f"{what} the {self.max_context} that this server can hold; shorten the prompt or ask for less"
        return ApiError(400, message, param=param, code="context_length_exceeded")
