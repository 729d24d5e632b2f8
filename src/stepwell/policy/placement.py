"""Which boundaries of a request get a checkpoint. Pure: positions in, positions out.

tokens    0 ......... resume ....................... prompt end
                        |--- known path ---|branch
stops                        k * interval  |       |  and the caller's hints
"""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.base.config import PlacementConfig
from stepwell.base.spec import ModelSpec


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
    step = _legal_step(spec, config.interval_tokens)
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
    """Whether `boundary` is one of the absolute multiples of the interval, which are kept in prompts and answers alike."""
    step = _legal_step(spec, config.interval_tokens)
    return step > 0 and boundary % step == 0


def _legal_step(spec: ModelSpec, interval_tokens: int) -> int:
    """The interval rounded up to whole legal boundaries; 0 for none."""
    return -(-interval_tokens // spec.boundary_step) * spec.boundary_step
