"""Requests to the engine, their answers, and the state of each. Data only; the engine changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import ConfigError
from stepwell.base.prompt import Namespace
from stepwell.engine.requests.guided import Following, Guide
from stepwell.engine.requests.seen import Seen
from stepwell.engine.requests.text import StopFinder, TextStream
from stepwell.jobs.executors import Arriving
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.lease import Lease, Sources
from stepwell.tree.match import Match

MAX_STOPS, MAX_STOP_TOKENS, MAX_LOGPROBS, MAX_BIASES = 16, 128, 20, 1024
MAX_TOP_K = 2**31 - 1  # no vocabulary is larger, and not every larger number can be sent to ranks
SEEDS = 2**64  # how many there are
MIN_TEMPERATURE = 1e-6  # a smaller one counts as 0: it chooses the same tokens, and may be 0 where scores are divided by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled. A temperature of 0 takes the likeliest token every time; so does one below 1e-6."""

    max_tokens: int | None = None  # None for `default_max_tokens`
    default_max_tokens: int | None = None  # or fewer if fewer fit; None for all that fit
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # number of alternatives with each token; 0 for the token's own logprob alone
    ignore_eos: bool = False
    min_p: float = 0.0  # of the likeliest token's share: less likely ones are not drawn
    frequency_penalty: float = 0.0  # times how often a token stands in the answer, subtracted from its logit
    presence_penalty: float = 0.0  # subtracted once
    repetition_penalty: float = 1.0  # by which tokens of the prompt and the answer are made less likely
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # before which nothing but max_tokens ends the answer
    show_special: bool = False  # special tokens stand in the text, as parsers of calls need them
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens; all of it is computed, for this request alone

    def most_tokens(self, capacity: int) -> int:
        """The longest answer if `capacity` tokens fit."""
        wanted = capacity if self.default_max_tokens is None else max(self.default_max_tokens, self.min_tokens)
        return self.max_tokens or min(wanted, capacity)

    @property
    def needs_tokens(self) -> bool:
        """Whether how a token is chosen depends on those before it."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def edits(self) -> bool:
        """Whether logits are changed before each token is chosen."""
        return self.needs_tokens or bool(self.logit_bias or (self.min_p and self.temperature))

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ConfigError(f"default_max_tokens must be at least 1, got {self.default_max_tokens}")
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature must be from 0 to 100, got {self.temperature}")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be more than 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}; leave it out for no limit")
        if self.top_k is not None and self.top_k > MAX_TOP_K:
            object.__setattr__(self, "top_k", MAX_TOP_K)
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed must be from 0 to 2**64 - 1, got {self.seed}")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise ConfigError(f"stop must be at most {MAX_STOPS} strings, none of them empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs must be from 0 to {MAX_LOGPROBS}, got {self.logprobs}")
        self._check_edits()

    def _check_edits(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must be from 0 to 1, got {self.min_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name} must be from -2 to 2, got {getattr(self, name)}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(f"repetition_penalty must be from 0.01 to 100, got {self.repetition_penalty}; 1 changes nothing")
        if len(self.logit_bias) > MAX_BIASES or not all(-100 <= bias <= 100 for _, bias in self.logit_bias):
            raise ConfigError(f"logit_bias must be at most {MAX_BIASES} biases from -100 to 100")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ConfigError("logit_bias names a token twice: give it one bias")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ConfigError(f"stop_token_ids must be at most {MAX_STOP_TOKENS}, got {len(self.stop_token_ids)}")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise ConfigError(f"min_tokens must be from 0 to max_tokens, got {self.min_tokens} and {self.max_tokens}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"prompt_logprobs must be from 0 to {MAX_LOGPROBS}, got {self.prompt_logprobs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request. Only those with the same `tenant` and `salt` share cached state.

    `hints` are token counts worth a checkpoint, such as the end of a system prompt.
    """

    tokens: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    salt: str | None = None
    tenant: str | None = None  # has a quota of the store
    priority: int = 0
    ttl_s: float | None = None
    hints: tuple[int, ...] = ()
    guide: Guide | None = None  # the grammar that its answer follows
    use_cache: bool = True  # false: computes all of its prompt, and caches nothing
    speculate: bool = True  # where the engine has a draft
    arrived_s: float | None = None  # by the engine's clock; None for when it is submitted

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= MAX_PRIORITY or (self.ttl_s is not None and self.ttl_s <= 0):
            raise ConfigError(f"priority must be 0 to {MAX_PRIORITY} and ttl_s positive, got {self.priority} and {self.ttl_s}")
        if any(not isinstance(hint, int) or hint < 0 for hint in self.hints):
            raise ConfigError(f"hints must be token counts, got {self.hints!r:.80}")


class Finish(Enum):
    STOP = "stop"  # the model ended its answer, or a stop string came
    LENGTH = "length"
    ABORTED = "abort"
    LATE = "timeout"  # its time was over: aborted too
    FAILED = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token: int
    logprob: float
    rank: int = 1  # among all tokens; 1 for the likeliest
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost. `sources` says where its prompt's tokens came from, and adds up to them."""

    prompt_tokens: int
    completion_tokens: int
    sources: Sources
    # Times in seconds after it arrived; None for a stage that it never reached.
    entered_s: float = 0.0  # the engine had it
    looked_up_s: float | None = None  # what is known of its prompt was found
    fetched_s: float | None = None  # it waited for the store no more; None where there was nothing to wait for
    queued_s: float = 0.0  # it began: what it needs was leased
    computes_s: float | None = None  # its bytes were there, and a pass was planned with it
    first_token_s: float = 0.0
    total_s: float = 0.0  # it ended
    preemptions: int = 0
    proposed_tokens: int = 0  # by the draft
    accepted_tokens: int = 0  # of those, the ones that the model chose as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """An addition to one answer: a token. If a draft guessed well, a step adds several, each with its own delta.

    The last one has `finish` and `usage`, and `error` if it failed. The first one has `prompt_logprobs` if requested, of all
    tokens of the prompt but the first.
    """

    request: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it
    usage: Usage | None = None
    error: str | None = None


@dataclass(kw_only=True, eq=False)
class Request:
    """One request in the engine. Waits while it has no lease."""

    id: int
    submitted: GenerateRequest
    namespace: Namespace
    max_tokens: int
    stream: TextStream | None
    stops: StopFinder
    seed: int  # of the random numbers for its tokens
    ends_on: frozenset[int]  # tokens that end its answer
    arrived_s: float
    entered_s: float  # when the engine had it
    waits_since_s: float  # since it arrived, or since it was last put back
    tokens: list[int]  # of the prompt and of the answer so far
    lease: Lease | None = None
    ticket: Ticket | None = None
    match: Match | None = None  # the match of its prompt, while it waits
    started: int = 0  # everything before it is computed, or in a pass in flight under its lease
    started_copies: bool = False  # whether the last of these copies its point state
    sources: Sources | None = None  # of the prompt, when it began
    looked_up_s: float | None = None
    fetched_s: float | None = None  # when it had waited for the store
    began_s: float | None = None
    computes_s: float | None = None  # since when it is in passes
    first_token_s: float | None = None
    preemptions: int = 0
    repacked_at: int | None = None  # its position when it was preempted for lack of memory, alone
    failures: int = 0  # leases whose bytes did not arrive
    proposed: int = 0
    accepted: int = 0
    broken: str | None = None  # why it cannot continue, if a pass found that out
    following: Following | None = None  # its state in the grammar, once needed
    seen: Seen | None = None  # for penalties, once needed
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # so far, if requested

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether how its next token is chosen depends on those before it."""
        return self.submitted.guide is not None or self.submitted.sampling.needs_tokens

    @cached_property
    def edits(self) -> bool:
        """Whether its logits are ever changed before a token is chosen."""
        return self.submitted.guide is not None or self.submitted.sampling.edits or self.submitted.sampling.min_tokens > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of its prompt must still be computed."""
        return self.submitted.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens - 1

    @cached_property
    def prompt_tokens(self) -> int:
        return len(self.submitted.tokens)

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def position(self) -> int:
        """Everything before it is computed."""
        return self.lease.position if self.lease is not None else 0

    @property
    def reached(self) -> int:
        """Everything before it is computed, or will be by a pass in flight."""
        return max(self.position, self.started)

    @property
    def runs(self) -> bool:
        return self.lease is not None and self.lease.ready

    def __repr__(self) -> str:
        return f"Request(#{self.id}, {self.prompt_tokens}+{self.answer_tokens} tokens, at {self.position})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The next tokens of a request, `[start, end)`; then `ahead` guesses of what follows, once they are `proposed`."""

    request: Request
    start: int
    end: int
    ahead: int = 0
    proposed: tuple[int, ...] = ()
    arriving: tuple[Arriving, ...] = ()  # loads that bring pages of its lease while it is computed; none if all pages are there
    point_copy: int | None = None  # the page to which its pass copies the point state that it ends with

    @property
    def size(self) -> int:
        return self.end + self.ahead - self.start

    @property
    def prompt_targets(self) -> Sequence[int]:
        """The known tokens after each of its own, if logprobs of the prompt are wanted."""
        return self.request.tokens[self.start + 1 : self.end + 1] if self.request.wants_prompt_logprobs else ()

    @property
    def num_logits(self) -> int:
        """The rows of logits that it needs: for prompt logprobs, for the next token, for each proposed token."""
        return len(self.prompt_targets) + (1 + len(self.proposed) if self.completes else 0)

    @property
    def follows(self) -> bool:
        """Whether its token is known only to the device: a pass in flight chooses it."""
        return self.start == len(self.request.tokens)

    @property
    def completes(self) -> bool:
        """Whether a token can be sampled after it."""
        return self.end >= len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it is the last token alone, perhaps with guesses after it."""
        return self.completes and self.end - self.start == 1
