"""Which boundaries of a request get a checkpoint, and which of a path's lose theirs. Pure: positions in, positions out.

tokens    0 ......... resume ....................... prompt end
                        |--- known path ---|branch
stops                        k * interval  |       |  and the caller's hints
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepwell.base.config import PlacementConfig
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec

LONGEST_STEP = 1 << 40  # tokens: a step beyond any prompt is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Waypoint:
    """A checkpoint on a path, as the rules that thin the path out see it."""

    boundary: int
    used_at_s: float  # or when it was left
    is_wanted: bool = False  # requests have left the path between it and the next one: they resumed here
    is_held: bool = False  # somebody reads or writes it now


def prompt_stops(
    spec: ModelSpec, config: PlacementConfig, *, resume: int, known: int, prompt_tokens: int, hints: Iterable[int] = ()
) -> tuple[int, ...]:
    """Boundaries after `resume` at which prefill must leave a checkpoint, in order."""
    if not spec.needs_checkpoint:
        return ()
    last = spec.usable(prompt_tokens)
    wanted = {spec.floor(hint) for hint in hints}
    if config.at_prompt_end:
        wanted.add(last)
    if config.at_branch:
        wanted.add(spec.floor(known))
    step = milestone_step(spec, config)
    if step:
        wanted.update(range(resume - resume % step + step, last + 1, step))
    return tuple(sorted(stop for stop in wanted if resume < stop <= last and spec.needs_checkpoint_at(stop)))


def next_decode_stop(spec: ModelSpec, config: PlacementConfig, *, position: int) -> int | None:
    """The next boundary after `position` at which a growing answer leaves a checkpoint."""
    step = _legal_step(spec, config.decode_interval_tokens)
    if not step or not spec.needs_checkpoint:
        return None
    stop = position - position % step + step
    # Of two stops in a row at least one needs a checkpoint, or none ever does.
    return next((each for each in (stop, stop + step) if spec.needs_checkpoint_at(each)), None)


def is_milestone(spec: ModelSpec, config: PlacementConfig, boundary: int) -> bool:
    """Whether `boundary` is a multiple of the milestone step; those are kept in prompts and answers alike."""
    step = milestone_step(spec, config)
    return step > 0 and boundary % step == 0


def milestone_step(spec: ModelSpec, config: PlacementConfig) -> int:
    """The interval in legal boundaries, doubled until checkpoints at its multiples add no more than they may; 0 for none.

    A model without prefix pages has nothing to compare them with, and keeps its interval.
    """
    step = _legal_step(spec, config.interval_tokens)
    page_bytes = spec.object_bytes(Kind.PREFIX)
    if not step or config.most_added is None or not page_bytes:
        return step
    window_bytes, point_bytes = spec.object_bytes(Kind.WINDOW), spec.object_bytes(Kind.POINT)
    while step <= LONGEST_STEP:
        # Neighbours share windows that overlap, so what one adds is what the first one has.
        added = len(spec.window_span(step)) * window_bytes + point_bytes if spec.needs_checkpoint_at(step) else 0
        if added <= config.most_added * (step // spec.page_tokens * page_bytes):
            return step
        step *= 2
    return 0


def _legal_step(spec: ModelSpec, interval_tokens: int) -> int:
    """The interval rounded up to whole legal boundaries; 0 for none."""
    return -(-interval_tokens // spec.boundary_step) * spec.boundary_step


def superseded(config: PlacementConfig, path: Sequence[Waypoint], *, start: int = 0) -> tuple[int, ...]:
    """The boundaries whose checkpoints are to go now that the last of `path` was left; in order, and in the path's own unit.

    `path` is in order, and follows `start`, from where one can resume too. Neither its last nor what is held ever goes.
    """
    kept = _thinned(path, config.thinning, start) if config.thinning else list(path)
    if config.path_cap:
        kept = _capped(kept, config.path_cap)
    staying = {each.boundary for each in kept}
    return tuple(each.boundary for each in path if each.boundary not in staying)


def _thinned(path: Sequence[Waypoint], part: float, start: int) -> list[Waypoint]:
    """What stays when each may go whose neighbours are close together, seen from the end of the path.

    tokens    start ....... a ....... b ....... c ......................... end
                            |--- c - a -----|   |      b goes when c - a < part * (end - b)
                                      |--- end - b -----------------------|
    """
    kept: list[Waypoint] = []
    for each, following in pairwise(path):
        before = kept[-1].boundary if kept else start
        is_close = following.boundary - before < part * (path[-1].boundary - each.boundary)
        if not is_close or each.is_wanted or each.is_held:
            kept.append(each)
    return [*kept, *path[-1:]]


def _capped(path: Sequence[Waypoint], cap: int) -> list[Waypoint]:
    """What stays when the oldest go until there are `cap`: those that nobody wants before the others."""
    may_go = [each for each in path[:-1] if not each.is_held]
    may_go.sort(key=lambda each: (each.is_wanted, each.used_at_s, each.boundary))
    going = {each.boundary for each in may_go[: max(len(path) - cap, 0)]}
    return [each for each in path if each.boundary not in going]
