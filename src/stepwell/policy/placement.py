"""Chooses the boundaries of a request that get a checkpoint. Pure: positions in, positions out.

tokens    0 ......... resume ....................... prompt end
                        |--- known path ---|branch
stops                        k * interval  |       |  and the caller's hints
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf

from stepwell.base.config import PlacementConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec

LONGEST_STEP = 1 << 40  # tokens; longer than any prompt
INTERVAL_TOKENS = 8192  # a prompt that diverges anywhere computes at most this number of tokens again
MOST_ADDED = 0.125  # of the bytes of pages: a checkpoint of Kimi-K3 every 8,192 tokens would take twice the bytes of its pages


class Trigger(Enum):
    """Why a checkpoint was left where it is."""

    PROMPT_END = "end of a prompt"
    ANSWER = "end of an answer so far"
    HINT = "end of a system prompt, or a hint"
    BRANCH = "prompts diverge here"
    INTERVAL = "at a regular interval"
    ASKED = "another request waited for it, or the engine chose it"
    STORE = "came from the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """Where checkpoints are left. The defaults are used in production; the simulator compares them with others."""

    interval_tokens: int = INTERVAL_TOKENS  # at absolute multiples of this, before `most_added` extends it; 0 for none
    most_added: float | None = MOST_ADDED  # the interval is doubled until checkpoints add no more than this; None: never
    decode_interval_tokens: int = PlacementConfig().decode_interval_tokens  # while an answer grows; only the last one is kept
    at_branch: bool = True  # where a request diverges from a known path, since others will diverge there too
    at_prompt_end: bool = True  # where the next turn of a conversation continues

    def __post_init__(self) -> None:
        if self.interval_tokens < 0 or self.decode_interval_tokens < 0:
            raise ConfigError("checkpoint intervals must be 0 (none) or a positive number of tokens")
        if self.most_added is not None and not 0 < self.most_added < inf:
            raise ConfigError(f"most_added must be a positive share, got {self.most_added}; leave it None for no limit")


def rules_for(config: PlacementConfig) -> PlacementRules:
    """The default rules with the operator's intervals. A given interval is exact; the default depends on the model's bytes."""
    if config.interval_tokens is None:
        return PlacementRules(decode_interval_tokens=config.decode_interval_tokens)
    return PlacementRules(
        interval_tokens=config.interval_tokens, most_added=None, decode_interval_tokens=config.decode_interval_tokens
    )


def prompt_stops(
    spec: ModelSpec, rules: PlacementRules, *, resume: int, known: int, prompt_tokens: int, hints: Iterable[int] = ()
) -> tuple[int, ...]:
    """Boundaries after `resume` at which prefill must leave a checkpoint, in order."""
    if not spec.needs_checkpoint:
        return ()
    last = spec.usable(prompt_tokens)
    wanted = {spec.floor(hint) for hint in hints}
    if rules.at_prompt_end:
        wanted.add(last)
    if rules.at_branch:
        wanted.add(spec.floor(known))
    step = milestone_step(spec, rules)
    if step:
        wanted.update(range(resume - resume % step + step, last + 1, step))
    return tuple(sorted(stop for stop in wanted if resume < stop <= last and spec.needs_checkpoint_at(stop)))


def next_decode_stop(spec: ModelSpec, rules: PlacementRules, *, position: int) -> int | None:
    """The next boundary after `position` where a growing answer leaves a checkpoint."""
    step = _legal_step(spec, rules.decode_interval_tokens)
    if not step or not spec.needs_checkpoint:
        return None
    stop = position - position % step + step
    # At least one of two successive stops needs a checkpoint, or none ever does.
    return next((each for each in (stop, stop + step) if spec.needs_checkpoint_at(each)), None)


def trigger_of(
    spec: ModelSpec, rules: PlacementRules, boundary: int, *, known: int, prompt_tokens: int, hints: Iterable[int] = ()
) -> Trigger:
    """Why a request leaves a checkpoint at `boundary`: the first reason that applies. `known` is as in `prompt_stops`."""
    if boundary >= prompt_tokens:
        return Trigger.INTERVAL if is_milestone(spec, rules, boundary) else Trigger.ANSWER
    if boundary == spec.usable(prompt_tokens):
        return Trigger.PROMPT_END
    if boundary in {spec.floor(hint) for hint in hints}:
        return Trigger.HINT
    if boundary == spec.floor(known):
        return Trigger.BRANCH
    return Trigger.INTERVAL if is_milestone(spec, rules, boundary) else Trigger.ASKED


def is_milestone(spec: ModelSpec, rules: PlacementRules, boundary: int) -> bool:
    """Whether `boundary` is a multiple of the milestone step. Milestones are kept in prompts and in answers."""
    step = milestone_step(spec, rules)
    return step > 0 and boundary % step == 0


def milestone_step(spec: ModelSpec, rules: PlacementRules) -> int:
    """The interval in legal boundaries, doubled until its checkpoints add no more bytes than allowed; 0 for none.

    A model without prefix pages has no bytes to compare them with, and keeps its interval.
    """
    step = _legal_step(spec, rules.interval_tokens)
    page_bytes = spec.object_bytes(Kind.PREFIX)
    if not step or rules.most_added is None or not page_bytes:
        return step
    # Device bytes, so that the format of checkpoints in lower tiers does not change the chunks of prompts.
    window_bytes, point_bytes = spec.device_bytes(Kind.WINDOW), spec.device_bytes(Kind.POINT)
    while step <= LONGEST_STEP:
        # Neighbours share overlapping windows, so each adds as many bytes as the first one has.
        added = len(spec.window_span(step)) * window_bytes + point_bytes if spec.needs_checkpoint_at(step) else 0
        if added <= rules.most_added * (step // spec.page_tokens * page_bytes):
            return step
        step *= 2
    return 0


def _legal_step(spec: ModelSpec, interval_tokens: int) -> int:
    """The interval rounded up to whole legal boundaries; 0 for none."""
    return -(-interval_tokens // spec.boundary_step) * spec.boundary_step
