"""Why a prompt would resume where it would, and not later: the state that stops it, the tier, and the reason.

Pure. A miss is never silent: whoever sees tokens computed again can ask here what became of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import Point, Prefix, Window
from stepwell.cache.core import Core
from stepwell.cache.link import LinkState
from stepwell.memory.arena import FILLING
from stepwell.tree.lacking import first_lacking
from stepwell.tree.match import Match
from stepwell.tree.node import ABSENT, Loss, LossReason, Node


class Cause(Enum):
    COMPLETE = "everything that can be reused is reused"
    NEVER_STORED = "these tokens were never stored"
    OTHER_NAMESPACE = "these tokens are stored, but for another model, adapter or salt"
    NO_CHECKPOINT = "no checkpoint was left between here and where the known text ends"
    ARRIVING = "the bytes are still on their way"
    EVICTED = "it was evicted to make room"
    FAILED = "its copy failed"
    EXPIRED = "its time to live ran out"
    CLEARED = "it was cleared on request"
    STORE = "the store's copy could not be used"
    LATE = "it had not arrived from the store when the request went on"
    STORE_OFF = "it may be in the store, which is switched off after failures"


_CAUSE_OF_LOSS = {
    LossReason.EVICTED: Cause.EVICTED,
    LossReason.FAILED: Cause.FAILED,
    LossReason.EXPIRED: Cause.EXPIRED,
    LossReason.CLEARED: Cause.CLEARED,
    LossReason.STORE: Cause.STORE,
    LossReason.LATE: Cause.LATE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What limits the reuse of one prompt. `states` are the ones that are missing past `restore_tokens`.

    `lacking` limits nothing: those states are missing before it, and without them an answer is the same, only slower.
    """

    prompt_tokens: int
    usable_tokens: int
    known_tokens: int
    arrived_tokens: int
    restore_tokens: int
    cause: Cause
    states: tuple[str, ...] = ()
    tier: Tier | None = None
    at_s: float | None = None
    detail: str = ""
    lacking: Mapping[str, int] = field(default_factory=dict)  # optional states that are missing, from which token on

    def __str__(self) -> str:
        depth = f"at best {self.usable_tokens}; text known to {self.known_tokens}"
        head = f"resumes at token {self.restore_tokens} of {self.prompt_tokens} ({depth})"
        missing = "".join(f"; without {state} from token {token} on, so slower" for state, token in self.lacking.items())
        return f"{head}: {self._why()}{missing}"

    def _why(self) -> str:
        if self.cause is Cause.COMPLETE:
            return str(self.cause.value)
        where = f" in the {self.tier.label} tier" if self.tier is not None else ""
        when = f" at t={self.at_s:.3f} s" if self.at_s is not None else ""
        why = f" ({self.detail})" if self.detail else ""
        return f"limited by {', '.join(self.states)}{where}: {self.cause.value}{why}{when}"


def explain(core: Core, match: Match) -> Explanation:
    """Names what stops a match, looking at it as it is now."""
    spec = core.spec
    usable = match.limit_tokens
    if match.restore_tokens == usable:
        return _because(match, usable, Cause.COMPLETE)
    if spec.needs_checkpoint and match.restore_tokens < spec.floor(match.arrived_tokens):
        return _missing_checkpoint(core, match, usable)
    prefix = tuple(s.name for s in spec.of_shape(Prefix)) or tuple(s.name for s in spec.states)
    if match.arrived_tokens < match.known_tokens:
        return _because(match, usable, Cause.ARRIVING, states=prefix, tier=_arriving_tier(core, match))
    loss = _loss_after(core, match)
    if loss is not None:
        return _because_of(match, usable, loss, prefix)
    if core.link is not None and core.link.state is LinkState.SWITCHED_OFF:
        return _because(match, usable, Cause.STORE_OFF, states=prefix, tier=Tier.STORE)
    if not match.known_tokens and _known_elsewhere(core, match):
        return _because(match, usable, Cause.OTHER_NAMESPACE, states=prefix)
    return _because(match, usable, Cause.NEVER_STORED, states=prefix)


def _because_of(match: Match, usable: int, loss: Loss, states: tuple[str, ...]) -> Explanation:
    cause = _CAUSE_OF_LOSS[loss.reason]
    return _because(match, usable, cause, states=states, tier=loss.tier, at_s=loss.at_s, detail=loss.detail)


def _because(
    match: Match, usable: int, cause: Cause, *, states: tuple[str, ...] = (), tier: Tier | None = None,
    at_s: float | None = None, detail: str = "",
) -> Explanation:  # fmt: skip
    return Explanation(
        prompt_tokens=match.prompt_tokens,
        usable_tokens=usable,
        known_tokens=match.known_tokens,
        arrived_tokens=match.arrived_tokens,
        restore_tokens=match.restore_tokens,
        cause=cause,
        states=states,
        tier=tier,
        at_s=at_s,
        detail=detail,
        lacking=first_lacking(match.path, match.restore_tokens),
    )


def _missing_checkpoint(core: Core, match: Match, usable: int) -> Explanation:
    """Prefix pages reach deeper than any checkpoint does: windows or points are what is missing."""
    spec, first = core.spec, match.restore_tokens // core.spec.page_tokens
    last = match.arrived_tokens // spec.page_tokens
    states = tuple(s.name for s in spec.states if isinstance(s.shape, (Window, Point)))
    for node in reversed(match.path):
        for checkpoint in (node.checkpoints or {}).values():
            if first < checkpoint.page <= last and not checkpoint.ready:
                held = next(residency for residency in checkpoint.held if residency is not None)
                return _because(match, usable, Cause.ARRIVING, states=states, tier=held.tier)
        losses = [(page, loss) for page, loss in (node.lost or {}).items() if isinstance(page, int) and first < page <= last]
        if losses:
            _, loss = max(losses, key=lambda pair: pair[0])
            return _because_of(match, usable, loss, states)
    return _because(match, usable, Cause.NO_CHECKPOINT, states=states)


def _loss_after(core: Core, match: Match) -> Loss | None:
    """A note of what once continued the path where it ends now."""
    node: Node | None = match.path[-1] if match.path else core.tree.roots.get(match.namespace.digest)
    if node is None or not node.lost:
        return None
    size = core.tree.page_bytes
    start = match.known_tokens // core.spec.page_tokens * size
    return node.lost.get(match.packed[start : start + size])


def _known_elsewhere(core: Core, match: Match) -> bool:
    page = match.packed[: core.tree.page_bytes]
    mine = match.namespace.digest
    return any(root.child(page) is not None for digest, root in core.tree.roots.items() if digest != mine)


def _arriving_tier(core: Core, match: Match) -> Tier | None:
    for node in match.path:
        for run in node.runs:
            if run is not None:
                ids = run.ids[run.ids != ABSENT]
                if (core.arena(run.tier).state[Kind.PREFIX][ids] == FILLING).any():
                    return run.tier
    return None
