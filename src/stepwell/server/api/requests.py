"""From the bytes of an HTTP request to `GenerateRequest`s for the engine.

Small bodies are parsed at once. The values of a large one are counted first, on a thread: the parser holds the interpreter lock,
and with it all streams, for as long as it runs (13 s for 32 MB of short lists), so a body with more values than a request can use
is refused before.

Types and ranges are checked. Unknown fields are ignored, because clients send more of them every year; the log names each one
once. Fields that would change an answer in an unsupported way are refused, unless they ask for the default.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock
from stepwell.engine.requests.guided import Guide
from stepwell.engine.requests.request import SEEDS, GenerateRequest, Sampling
from stepwell.server.access.tenants import Principal
from stepwell.server.api.bodies import GenerationBody
from stepwell.server.errors import ApiError, of_problems
from stepwell.server.served import LARGE_BYTES, Served

log = logging.getLogger(__name__)

_ASK_OPERATOR = "have it raised in the server's tenants file"
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's
_LONG_ID = 10  # more digits than a token id has
MAX_UNKNOWN = 64  # unknown fields of a body
_MOST_NAMES = 10_000  # logged field names, and clients, that are remembered
_MOST_LINES = 20  # per minute and client
_MINUTE_S = 60.0

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "input_embeds": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "lora_path": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "return_logprob": (False,),
    "sampling_params": ({},),
    "separate_reasoning": (True,),
    "stop_regex": ("", []),
    "suffix": ("",),
    "tenant": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1.0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

_INSTEAD = {
    "lora_path": "this server does not support adapters: leave it out",
    "max_new_tokens": "send max_tokens",
    "sampling_params": "send its fields at the top level of the body",
    "tenant": "leave it out, and send the API key of the tenant whose request it is",
    "thinking_token_budget": "leave it out; max_tokens ends reasoning and answer together",
}

_CHANGE_NOTHING = frozenset(  # ignored without a warning: accounting, or hints for speed
    (
        "guided_decoding_backend", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "request_id", "rid", "safety_identifier", "service_tier", "store", "user",
    )
)  # fmt: skip
MAX_NESTED = 100_000  # lists and objects in one body
MAX_NUMBER = 64  # characters of a number
_TOKEN = re.compile(rb'[\s,]{0,4096}+(["\[\]{}:]|[^\s,:"\[\]{}]{1,%d})?' % (MAX_NUMBER + 1))  # of JSON, after separators
_IN_STRING = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,1024}+("?)', re.DOTALL)
B = TypeVar("B", bound=BaseModel)


# ---- reading ------------------------------------------------------------------------------------


async def read_body(served: Served, request: Request, kind: type[B]) -> tuple[B, int]:
    """The body and its size in bytes. Raises ApiError."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(400, "the body must be a JSON object sent as application/json")
    raw = await request.body()
    if len(raw) <= LARGE_BYTES:
        return _checked(kind, raw), len(raw)
    most_fields = len(kind.model_fields) + MAX_UNKNOWN

    def read() -> B:
        _check_size(raw, most_values=served.max_values, most_fields=most_fields)
        return _checked(kind, raw)

    return await served.run_in_thread(len(raw), read), len(raw)


def _checked(kind: type[B], raw: bytes) -> B:
    try:
        values = json.loads(raw.decode())
    except RecursionError:
        raise ApiError(400, "the body is not JSON: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if isinstance(values, dict) and len(values.keys() - kind.model_fields.keys()) > MAX_UNKNOWN:
        raise _too_many_fields()
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise of_problems(error.errors(include_url=False, include_input=False)) from None


def _too_many_fields() -> ApiError:
    why = f"the body has more than {MAX_UNKNOWN} unknown fields: leave them out"
    return ApiError(400, why, code="too_many_fields")


def _too_large(most: int, what: str) -> ApiError:
    return ApiError(400, f"the body holds more than {most} {what}, more than any prompt here needs", code="body_too_large")


def _check_size(raw: bytes, *, most_values: int, most_fields: int) -> None:
    """Raises ApiError for more numbers and strings, lists and objects, or fields of the outermost object, than a request can use.

    Counts a token of JSON at a time, so that other threads can run, and stops at the first one too many. Refuses long numbers,
    because the parser holds the interpreter lock while it converts them.
    """
    values = nested = fields = depth = at = 0
    while at < len(raw):
        token = _TOKEN.match(raw, at)
        assert token is not None, "the pattern matches anything"
        kind, at = token.group(1), token.end()
        if kind is None:
            continue  # more separators than one match takes
        if kind in (b"[", b"{"):
            depth, nested = depth + 1, nested + 1
        elif kind in (b"]", b"}"):
            depth -= 1
        elif kind == b":":
            fields += depth == 1
        else:
            values += 1
            at = _after_string(raw, at) if kind == b'"' else at
            if len(kind) > MAX_NUMBER:
                raise ApiError(400, f"the body holds a number of more than {MAX_NUMBER} characters", code="body_too_large")
        if fields > most_fields:
            raise _too_many_fields()
        if values > most_values:
            raise _too_large(most_values, "numbers and strings")
        if nested > MAX_NESTED:
            raise _too_large(MAX_NESTED, "lists and objects")


def _after_string(raw: bytes, at: int) -> int:
    """The position after the string that begins before `at`. Each match is short, so that other threads can run."""
    while (part := _IN_STRING.match(raw, at)) is not None and not part.group(1) and part.end() > at:
        at = part.end()
    return at if part is None else part.end()


# ---- fields ------------------------------------------------------------------------------


class UnknownFields:
    """Logs each unknown field once. The event loop's thread.

    The number of lines per minute and client is limited, so that one client cannot crowd out the others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._named: OrderedDict[str, None] = OrderedDict()
        self._lines: Counter[str] = Counter()  # in this minute, by client
        self._since_s = clock.now()

    def note(self, names: Iterable[str], client: str) -> None:
        if self._clock.now() >= self._since_s + _MINUTE_S or len(self._lines) > _MOST_NAMES:
            self._lines.clear()
            self._since_s = self._clock.now()
        for name in names:
            if name in self._named or self._lines[client] >= _MOST_LINES:
                continue
            self._lines[client] += 1
            self._named[name] = None
            if len(self._named) > _MOST_NAMES:
                self._named.popitem(last=False)
            log.warning("ignoring the unknown request field %r", name[:80])


def refuse_unsupported(body: GenerationBody, principal: Principal, unknown: UnknownFields, client: str) -> None:
    """Raises ApiError for unsupported fields, and for values beyond the client's limits. Notes unknown fields."""
    if (body.priority or 0) > principal.max_priority:
        more = f"start the server with --max-priority {body.priority}" if principal.name is None else _ASK_OPERATOR
        message = f"priority may be at most {principal.max_priority} here: leave it out, or {more}"
        raise ApiError(400, message, param="priority", code="unsupported_parameter")
    must_be_within_ttl(principal, body.cache_ttl_s, param="cache_ttl_s")
    fields = dict(body.model_extra or {})
    for name, value in fields.items():
        if value is None or name not in _ONLY_VALUES or value in _ONLY_VALUES[name]:
            continue
        allowed = " or ".join(repr(each) for each in _ONLY_VALUES[name])
        what = _INSTEAD.get(name, f"it may only be {allowed}" if allowed else "leave it out")
        raise ApiError(400, f"{name} is not supported; {what}", param=name, code="unsupported_parameter")
    unknown.note([name for name in fields if name not in _ONLY_VALUES and name not in _CHANGE_NOTHING], client)
    unknown.note([f"stream_options.{name}" for name in _extra(body.stream_options)], client)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not supported in streams: leave out stream", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only for stream=true", param="stream_options")


def _extra(given: BaseModel | None) -> Collection[str]:
    return () if given is None else (given.model_extra or {}).keys()


def must_be_within_ttl(principal: Principal, ttl_s: float | None, *, param: str) -> None:
    if not principal.within_ttl(ttl_s):
        message = f"{param} may be at most {principal.max_ttl_s:g} here: leave it out for this value, or {_ASK_OPERATOR}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def sampling_of(
    served: Served, body: GenerationBody, *, max_tokens: int | None, logprobs: int | None,
    prompt_logprobs: int | None, show_special: bool = False,
) -> Sampling:  # fmt: skip
    """Settings from the body, else the model's defaults, else OpenAI's. Raises ApiError."""
    defaults = served.defaults
    top_k = body.top_k if body.top_k is not None else int(defaults.get("top_k", 0))
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        return Sampling(
            max_tokens=max_tokens,
            default_max_tokens=served.default_max_tokens,
            temperature=_first(body.temperature, defaults.get("temperature"), 1.0),
            top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
            top_k=top_k if top_k > 0 else None,
            seed=None if body.seed is None else body.seed % SEEDS,
            stop=tuple(stop),
            logprobs=logprobs,
            ignore_eos=bool(body.ignore_eos),
            min_p=_first(body.min_p, defaults.get("min_p"), 0.0),
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=_first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
            logit_bias=_biases(body.logit_bias or {}),
            stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
            min_tokens=body.min_tokens or 0,
            prompt_logprobs=prompt_logprobs,
            show_special=show_special or body.skip_special_tokens is False,
        )
    except ConfigError as error:  # its message begins with the field's name
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), param=name if name in type(body).model_fields else None) from None


def requests_of(
    body: GenerationBody, principal: Principal, tokens: list[int], sampling: Sampling, *, arrived_s: float,
    hints: tuple[int, ...] = (), guide: Guide | None = None,
) -> list[GenerateRequest]:  # fmt: skip
    """One request per choice of a prompt. With a seed, each choice gets its own, so that choices differ and are reproducible."""
    first = GenerateRequest(
        tokens=tokens,
        sampling=sampling,
        salt=principal.salted(body.cache_salt),
        tenant=principal.name,
        priority=body.priority or 0,
        ttl_s=principal.ttl_s(body.cache_ttl_s),
        hints=hints,
        guide=guide,
        use_cache=body.use_cache is not False,
        arrived_s=arrived_s,
    )
    if sampling.seed is None:
        return [first] * body.choices
    seeds = range(sampling.seed, sampling.seed + body.choices)
    return [replace(first, sampling=replace(sampling, seed=seed % SEEDS)) for seed in seeds]


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Token ids arrive as text, because they are names of an object's fields."""
    if not all(token.isascii() and token.isdecimal() and len(token) < _LONG_ID for token in given):
        raise ApiError(400, 'logit_bias must map token ids to numbers, as in {"42": -100}', param="logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())


def _first(*values: float | None) -> float:
    return float(next(value for value in values if value is not None))
