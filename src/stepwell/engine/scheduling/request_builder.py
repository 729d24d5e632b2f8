"""Checks a submitted request against what this engine can hold, and makes the engine's `Request` of it.

Queues nothing, and changes nothing but the counter of request numbers.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from stepwell.base.errors import BadTokens, ConfigError
from stepwell.base.meters import Clock
from stepwell.cache.facade import Cache
from stepwell.engine.requests.request import GenerateRequest, Request
from stepwell.engine.requests.text import StopFinder, Text
from stepwell.engine.running.runner import Facts
from stepwell.engine.scheduling.footprint import longest_request


class RequestBuilder:
    """For the engine's thread."""

    def __init__(
        self, cache: Cache, text: Text | None, facts: Facts, clock: Clock, *, chunk_tokens: int, max_context: int, max_alone: int,
        eos_ids: frozenset[int],
    ) -> None:  # fmt: skip
        """`max_alone`: the limit for requests that do not use the cache, and so do not spill."""
        self._cache = cache
        self._text = text
        self._facts = facts
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._max_context = max_context
        self._max_alone = max_alone
        self._eos_ids = eos_ids
        self._last_id = 0
        self._longest: dict[int, int] = {}  # the most tokens of a request, by the number of its pages that may spill

    def build(self, submitted: GenerateRequest) -> Request:
        """A request with a new number. Raises ConfigError or BadTokens."""
        sampling = submitted.sampling
        if sampling.prompt_logprobs is not None:
            submitted = replace(submitted, use_cache=False)  # cached tokens are not computed, and would have no logprobs
        most = self.most_tokens(submitted)
        free_tokens = most - len(submitted.tokens)
        if free_tokens < 1 or (sampling.max_tokens or 0) > free_tokens:
            raise ConfigError(
                f"{len(submitted.tokens)} prompt tokens and {sampling.max_tokens or 1} to come exceed the {most} "
                f"that this server can hold; shorten the prompt or ask for less"
                + (", or use the cache" if not submitted.use_cache and most < self._max_context else "")
            )
        if len(submitted.tokens) and not 0 <= min(submitted.tokens) <= max(submitted.tokens) < self._facts.vocab_size:
            raise BadTokens(f"token ids must be from 0 to {self._facts.vocab_size - 1}")
        named = [*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]
        if named and not 0 <= min(named) <= max(named) < self._facts.vocab_size:
            raise BadTokens(f"stop_token_ids and logit_bias must name tokens from 0 to {self._facts.vocab_size - 1}")
        if sampling.stop and self._text is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none")
        keeps_on = sampling.ignore_eos and submitted.guide is None  # nothing can follow the end of a grammar
        self._last_id += 1
        arrived_s = submitted.arrived_s if submitted.arrived_s is not None else self._clock.now()
        return Request(
            id=self._last_id,
            submitted=submitted,
            namespace=self._cache.namespace_for(salt=submitted.salt, tenant=submitted.tenant),
            max_tokens=sampling.most_tokens(free_tokens),
            stream=self._text.stream(submitted.tokens, special=sampling.show_special) if self._text is not None else None,
            stops=StopFinder(sampling.stop),
            ends_on=frozenset(sampling.stop_token_ids) | (frozenset() if keeps_on else self._eos_ids),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            arrived_s=arrived_s,
            entered_s=self._clock.now(),
            waits_since_s=arrived_s,
            tokens=list(submitted.tokens),
        )

    def most_tokens(self, submitted: GenerateRequest) -> int:
        """The most tokens of a request with its answer. Rows of sparse answers are not published, so they stay on the device."""
        selector = self._facts.selector
        if not submitted.use_cache or selector is None or self._cache.spec.spill is None:
            return self._max_context if submitted.use_cache else self._max_alone
        size = self._cache.spec.page_tokens
        pages = max(len(submitted.tokens), selector.count) // size
        if pages not in self._longest:  # whole pages spill, so there are few different keys
            longest = longest_request(self._cache, self._chunk_tokens, spills_upto=pages * size, most=self._max_context)
            self._longest[pages] = longest
        return self._longest[pages]
