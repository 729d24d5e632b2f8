"""The bodies of requests: OpenAI's fields, and ours beside them. Checks types and ranges; asks the engine nothing.

Fields nobody knows are let through, for clients send more every year, and the log says so once for each. Those known to change
an answer in ways this server cannot are refused, unless they ask for what happens anyway: an answer that silently is another one
helps nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Field, field_validator

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import ConfigError
from stepwell.engine.request import Ask, Sampling
from stepwell.server.errors import ApiError
from stepwell.server.principals import Principal
from stepwell.server.served import MAX_CHOICES

log = logging.getLogger(__name__)

MAX_SALT = 256
_ASK_OPERATOR = "have it raised in the server's tenants file"
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's
_INT64 = 2**63
_MOST_WARNINGS = 100  # clients choose names of fields

# One wrong element says enough: a body can hold millions, and each would get a message of its own.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Union[str, Strings, TokenIds, Annotated[list[TokenIds], Field(fail_fast=True)]]  # noqa: UP007

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tenant": (),
    "tool_choice": ("auto", "none"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

_INSTEAD = {"tenant": "leave it out, and send the API key of the tenant whose request it is"}

_CHANGE_NOTHING = frozenset(  # and need no warning: what OpenAI and vLLM take for their own books
    (
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier",
        "service_tier", "store", "user",
    )
)  # fmt: skip


class Body(BaseModel):
    """Types are what they say: "12" is no number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class Kept(Body):
    """How the cache treats a prompt. A salt separates: only requests with the same one share anything."""

    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT)

    @field_validator("cache_salt")
    @classmethod
    def _salt_is_whole(cls, salt: str | None) -> str | None:
        return None if salt is None else whole(salt)


class StreamOptions(Body):
    include_usage: bool | None = None


class Asked(Kept):
    """What completions and chats have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 for no limit
    seed: int | None = Field(None, ge=0, lt=_INT64)
    stop: str | Strings | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=0, le=MAX_PRIORITY)
    cache_ttl_s: float | None = Field(None, gt=0)
    use_cache: bool | None = None  # false: nothing cached is used, and nothing it computes is cached

    @field_validator("stop")
    @classmethod
    def _stop_is_whole(cls, stop: str | list[str] | None) -> str | list[str] | None:
        for each in [stop] if isinstance(stop, str) else stop or []:
            whole(each)
        return stop

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(Asked):
    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=20)


class ChatBody(Asked):
    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def whole(text: str) -> str:
    """The text, or ValueError where it cannot be encoded, which JSON does not rule out."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a lone surrogate): send whole ones") from None
    return text


class Unknown:
    """Says once in the log which fields of bodies were not understood. For the event loop's thread."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._said and len(self._said) < _MOST_WARNINGS:
                self._said.add(name)
                log.warning("requests have a field %r, which is not known here and is ignored", name[:80])


def refuse_unsupported(body: Asked, principal: Principal, unknown: Unknown) -> None:
    """Raises ApiError for fields that ask for another answer than this server can make, or for more than clients may."""
    if (body.priority or 0) > principal.max_priority:
        more = f"start the server with --max-priority {body.priority}" if principal.name is None else _ASK_OPERATOR
        message = f"priority may be at most {principal.max_priority} here: leave it out, or {more}"
        raise ApiError(400, message, param="priority", code="unsupported_parameter")
    must_be_within_ttl(principal, body.cache_ttl_s, param="cache_ttl_s")
    fields = dict(body.model_extra or {})
    if isinstance(body, ChatBody):
        fields["tool_choice"] = body.tool_choice
    for name, value in fields.items():
        if value is None or name not in _ONLY_VALUES or value in _ONLY_VALUES[name]:
            continue
        allowed = ", ".join(repr(each) for each in _ONLY_VALUES[name])
        what = f"it may only be {allowed}" if allowed else _INSTEAD.get(name, "leave it out")
        raise ApiError(400, f"{name} is not supported; {what}", param=name, code="unsupported_parameter")
    unknown.note(name for name in fields if name not in _ONLY_VALUES and name not in _CHANGE_NOTHING)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only for stream=true", param="stream_options")


def must_be_within_ttl(principal: Principal, ttl_s: float | None, *, param: str) -> None:
    if not principal.within_ttl(ttl_s):
        message = f"{param} may be at most {principal.max_ttl_s:g} here: leave it out for that, or {_ASK_OPERATOR}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def sampling_of(
    body: Asked, defaults: Mapping[str, float | int | bool], *, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """What the body says, then what the model's makers suggest, then OpenAI's defaults. Raises ApiError."""
    top_k = body.top_k if body.top_k is not None else int(defaults.get("top_k", 0))
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        return Sampling(
            max_tokens=max_tokens,
            temperature=_first(body.temperature, defaults.get("temperature"), 1.0),
            top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
            top_k=top_k if top_k > 0 else None,
            seed=body.seed,
            stop=tuple(stop),
            logprobs=logprobs,
            ignore_eos=bool(body.ignore_eos),
        )
    except ConfigError as error:
        raise ApiError(400, str(error)) from None


def asks_of(
    body: Asked, principal: Principal, tokens: list[int], sampling: Sampling, *, arrived_s: float, hints: tuple[int, ...] = ()
) -> list[Ask]:
    """One for each choice wanted of a prompt. With a seed each gets its own, so that they differ and repeat."""
    first = Ask(
        tokens=tokens,
        sampling=sampling,
        salt=principal.salted(body.cache_salt),
        tenant=principal.name,
        priority=body.priority or 0,
        ttl_s=principal.ttl_s(body.cache_ttl_s),
        hints=hints,
        use_cache=body.use_cache is not False,
        arrived_s=arrived_s,
    )
    if sampling.seed is None:
        return [first] * body.choices
    seeds = range(sampling.seed, sampling.seed + body.choices)
    return [replace(first, sampling=replace(sampling, seed=seed)) for seed in seeds]


def _first(*values: float | None) -> float:
    return float(next(value for value in values if value is not None))
