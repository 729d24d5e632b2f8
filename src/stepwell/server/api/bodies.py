"""Bodies of requests: the fields of OpenAI, vLLM, SGLang and Stepwell, with types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Field, field_validator

from stepwell.base.config import MAX_PRIORITY
from stepwell.engine.requests.request import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS
from stepwell.server.served import MAX_CHOICES

MAX_SALT = 256
_INT64 = 2**63

# Fail on the first wrong element: a body can hold millions, and each would get a message.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Union[str, Strings, TokenIds, Annotated[list[TokenIds], Field(fail_fast=True)]]  # noqa: UP007


class Body(BaseModel):
    """Types are strict: "12" is not a number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class CacheBody(Body):
    """Fields for the cache. Only requests with the same salt share cached state."""

    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT)

    @field_validator("cache_salt")
    @classmethod
    def _salt_is_whole(cls, salt: str | None) -> str | None:
        return None if salt is None else whole(salt)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # every chunk has the usage so far


class GenerationBody(CacheBody):
    """Fields shared by completions and chats."""

    model: str | None = None  # default: the served model
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 for no limit
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: str | Strings | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None  # SGLang's names
    regex: str | None = None
    ebnf: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    stop_token_ids: TokenIds | None = Field(None, max_length=MAX_STOP_TOKENS)
    min_tokens: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    priority: int | None = Field(None, ge=0, le=MAX_PRIORITY)
    cache_ttl_s: float | None = Field(None, gt=0)
    kv_transfer_params: dict[str, Any] | None = None  # from a router: see `handover.py`
    use_cache: bool | None = None  # false: neither read nor fill the cache

    @field_validator("stop")
    @classmethod
    def _stop_is_whole(cls, stop: str | list[str] | None) -> str | list[str] | None:
        for each in [stop] if isinstance(stop, str) else stop or []:
            whole(each)
        return stop

    @property
    def is_guided(self) -> bool:
        """Whether the request asks for a grammar."""
        is_text = (self.response_format or {}).get("type", "text") == "text"
        older = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        asked = (*older, self.json_schema, self.regex, self.ebnf, *(self.structured_outputs or {}).values())
        return not is_text or any(each is not None and each is not False for each in asked)

    @property
    def compiles(self) -> bool:
        """Whether the request may have to compile a grammar, which is slow."""
        return self.is_guided

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage_chunk and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)  # 0 only with `echo`, for the prompt's logprobs
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def compiles(self) -> bool:
        return self.is_guided or self.tool_choice not in (None, "none", "auto")


def whole(text: str) -> str:
    """Returns the text, or raises ValueError if it cannot be encoded, which JSON permits."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text contains half a character (a lone surrogate)") from None
    return text
