"""Explains why a prompt would resume where it would, and not later: the limiting state, the tier, and the reason.

Pure. A miss is never silent: if tokens are computed again, this says why. The caller passes what the store has; `question.py`
asks the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum

from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import Point, Prefix, Window
from stepwell.memory.arena import FILLING
from stepwell.policy.store_use import Flags, reachable
from stepwell.store_tier.link import LinkState, StoreLink
from stepwell.store_tier.prefetch import is_expected_to_pay, may_run, points_with_store
from stepwell.tiers.state import CacheState
from stepwell.tree.keys import path_keys
from stepwell.tree.match import Match
from stepwell.tree.missing_state import missing_states_before
from stepwell.tree.node import ABSENT, Loss, LossReason, Node
from stepwell.tree.notes import key_of


class Cause(Enum):
    COMPLETE = "everything that can be reused is reused"
    TOO_SHORT = "the prompt is shorter than a page, the least that is kept"
    NEVER_STORED = "these tokens were never stored"
    OTHER_NAMESPACE = "these tokens are stored, but for another model or adapter"
    NO_CHECKPOINT = "no checkpoint was left between here and where the known text ends"
    ARRIVING = "the bytes are still on their way"
    IN_STORE = "it is in the store, not in memory"
    EVICTED = "it was evicted to free memory"
    OVER_QUOTA = "it was evicted to free memory, since its tenant was over its memory quota"
    FAILED = "its copy failed"
    EXPIRED = "its time to live ran out"
    CLEARED = "it was cleared on request"
    STORE = "the store's copy could not be used"
    DEVICE = "it was on a device that was lost"
    LATE = "it had not arrived from the store when the request went on"
    STORE_OFF = "it may be in the store, which is switched off after failures"


_CAUSE_OF_LOSS = {
    LossReason.EVICTED: Cause.EVICTED,
    LossReason.OVER_QUOTA: Cause.OVER_QUOTA,
    LossReason.FAILED: Cause.FAILED,
    LossReason.EXPIRED: Cause.EXPIRED,
    LossReason.CLEARED: Cause.CLEARED,
    LossReason.STORE: Cause.STORE,
    LossReason.DEVICE: Cause.DEVICE,
    LossReason.LATE: Cause.LATE,
}
_NOTHING_KNOWN = (Cause.NEVER_STORED, Cause.OTHER_NAMESPACE)  # in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSays:
    """What the store has of a prompt: by page, and by boundary; or a note of why that is not known."""

    has_page: Flags | None = None
    has_checkpoint: Flags | None = None
    note: str = ""


NOT_ASKED = StoreSays()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What limits the reuse of one prompt. `states` are the ones that are missing past `restore_tokens`.

    `device_tokens` and `host_tokens` say where that comes from: which tier has the rows of its tokens now, whatever else of their
    pages is on the device.
    `store_tokens` is where the prompt would resume with what the store has; None when that is not known: see `store_note`.
    `missing_states` limits nothing: those states are missing before it, and without them an answer is the same, only slower.
    """

    prompt_tokens: int
    usable_tokens: int
    known_tokens: int
    arrived_tokens: int
    restore_tokens: int
    device_tokens: int
    host_tokens: int
    cause: Cause
    states: tuple[str, ...] = ()
    tier: Tier | None = None
    at_s: float | None = None  # on the cache's clock
    at: datetime | None = None  # the same by the time of day
    detail: str = ""
    store_tokens: int | None = None
    store_note: str = ""
    missing_states: Mapping[str, int] = field(default_factory=dict)  # optional states that are missing, from which token on

    def __str__(self) -> str:
        depth = f"at best {self.usable_tokens}; text known to {self.known_tokens}"
        store = self.store_tokens is not None and self.store_tokens > self.restore_tokens
        more = f" from memory, at {self.store_tokens} with the store" if store else ""
        tiers = {Tier.DEVICE: self.device_tokens, Tier.HOST: self.host_tokens}
        where = "".join(f", {tokens} from the {tier.label}" for tier, tokens in tiers.items() if tokens)
        head = f"resumes at token {self.restore_tokens} of {self.prompt_tokens}{where}{more} ({depth})"
        missing = "".join(f"; without {state} from token {token} on, so slower" for state, token in self.missing_states.items())
        note = f"; {self.store_note}" if self.store_note and self.cause is not Cause.COMPLETE else ""
        return f"{head}: {self._why()}{note}{missing}"

    def _why(self) -> str:
        where = f" in the {self.tier.label} tier" if self.tier is not None else ""
        limit = f"limited by {', '.join(self.states)}{where}: " if self.states else ""
        return limit + self.reason

    @property
    def reason(self) -> str:
        """The cause with its detail and time."""
        why = f" ({self.detail})" if self.detail else ""
        when = f" at {self.at.strftime('%Y-%m-%dT%H:%M:%SZ')}" if self.at is not None else ""
        return f"{self.cause.value}{why}{when}"


def explain(state: CacheState, link: StoreLink | None, match: Match, store: StoreSays = NOT_ASKED) -> Explanation:
    """Names what stops a match, looking at it as it is now, with what the store was found to have."""
    memory = _explain_memory(state, link, match)
    if store.has_page is None or store.has_checkpoint is None or memory.cause in (Cause.COMPLETE, Cause.TOO_SHORT):
        return replace(memory, store_note=store.note)
    page, usable = state.spec.page_tokens, match.limit_tokens
    points = points_with_store(state, match, store.has_page, store.has_checkpoint)
    found = replace(memory, store_tokens=points[0] * page if points else match.restore_tokens)
    if points and not may_run(state, match):
        found = replace(found, store_note="it is not fetched: the device cannot hold a prompt of this length")
    elif points and link is not None and not is_expected_to_pay(state, link, match, points[0]):
        found = replace(found, store_note="fetching that is expected to take longer than computing")
    if memory.cause in (Cause.ARRIVING, Cause.LATE, Cause.STORE):
        return found  # that the store has it does not say that it comes, or in time, or that it is any good
    if found.store_tokens == usable:
        why = "" if memory.cause in _NOTHING_KNOWN else f"of memory: {memory.reason}"
        return replace(found, cause=Cause.IN_STORE, tier=Tier.STORE, at_s=None, at=None, detail=why)
    if memory.cause in _NOTHING_KNOWN and points:
        found = replace(found, cause=Cause.NEVER_STORED)
    reach = state.spec.floor(reachable(match.known_tokens // page, store.has_page) * page)
    if memory.cause in _NOTHING_KNOWN and state.spec.needs_checkpoint and (found.store_tokens or 0) < reach:
        return replace(found, cause=Cause.NO_CHECKPOINT, states=_checkpoint_states(state), tier=Tier.STORE)
    return found


def _explain_memory(state: CacheState, link: StoreLink | None, match: Match) -> Explanation:
    spec = state.spec
    usable = match.limit_tokens
    late = _given_up(state, link, match)
    if not (usable or spec.usable(match.prompt_tokens)):
        return _because(state, match, Cause.TOO_SHORT, detail=f"reuse begins with {spec.boundary_step + 1} tokens")
    if match.restore_tokens == usable:
        if late is None:
            return _because(state, match, Cause.COMPLETE)
        return _because(state, match, Cause.COMPLETE, at_s=late.at_s, detail=f"a fetch of it was {late.detail}")
    prefix = tuple(s.name for s in spec.of_shape(Prefix)) or tuple(s.name for s in spec.states)
    if spec.needs_checkpoint and match.restore_tokens < spec.floor(match.arrived_tokens):
        found = _missing_checkpoint(state, match)
        return found if late is None or found.cause is not Cause.NO_CHECKPOINT else _because_of(state, match, late, found.states)
    if match.arrived_tokens < match.known_tokens:
        return _because(state, match, Cause.ARRIVING, states=prefix, tier=_arriving_tier(state, match))
    loss = _loss_after(state, match)
    if late is not None and (loss is None or loss.at_s <= late.at_s):
        loss = late
    if loss is not None:
        return _because_of(state, match, loss, prefix)
    if link is not None and link.state is LinkState.SWITCHED_OFF:
        return _because(state, match, Cause.STORE_OFF, states=prefix, tier=Tier.STORE)
    if not match.known_tokens and _known_elsewhere(state, match):
        return _because(state, match, Cause.OTHER_NAMESPACE, states=prefix)
    return _because(state, match, Cause.NEVER_STORED, states=prefix)


def _because_of(state: CacheState, match: Match, loss: Loss, states: tuple[str, ...]) -> Explanation:
    cause = _CAUSE_OF_LOSS[loss.reason]
    return _because(state, match, cause, states=states, tier=loss.tier, at_s=loss.at_s, detail=loss.detail)


def _because(
    state: CacheState, match: Match, cause: Cause, *, states: tuple[str, ...] = (), tier: Tier | None = None,
    at_s: float | None = None, detail: str = "",
) -> Explanation:  # fmt: skip
    return Explanation(
        prompt_tokens=match.prompt_tokens,
        usable_tokens=match.limit_tokens,
        known_tokens=match.known_tokens,
        arrived_tokens=match.arrived_tokens,
        restore_tokens=match.restore_tokens,
        device_tokens=match.device_tokens,
        host_tokens=match.host_tokens,
        cause=cause,
        states=states,
        tier=tier,
        at_s=at_s,
        at=datetime.fromtimestamp(state.clock.wall_s(at_s), UTC) if at_s is not None else None,
        detail=detail,
        missing_states=missing_states_before(match.path, match.restore_tokens),
    )


def _missing_checkpoint(state: CacheState, match: Match) -> Explanation:
    """Prefix pages reach deeper than any checkpoint does: windows or points are what is missing."""
    spec, first = state.spec, match.restore_tokens // state.spec.page_tokens
    last = match.arrived_tokens // spec.page_tokens
    states = _checkpoint_states(state)
    for node in reversed(match.path):
        for checkpoint in (node.checkpoints or {}).values():
            if first < checkpoint.page <= last and not checkpoint.ready:
                held = next(residency for residency in checkpoint.residencies if residency is not None)
                return _because(state, match, Cause.ARRIVING, states=states, tier=held.tier)
        losses = [(page, loss) for page, loss in state.tree.lost_checkpoints.of(node).items() if first < page <= last]
        if losses:
            _, loss = max(losses, key=lambda pair: pair[0])
            return _because_of(state, match, loss, states)
    behind = _loss_after(state, match)  # and the checkpoints that stood there with it
    if behind is not None:
        return _because_of(state, match, behind, states)
    return _because(state, match, Cause.NO_CHECKPOINT, states=states)


def _checkpoint_states(state: CacheState) -> tuple[str, ...]:
    return tuple(s.name for s in state.spec.states if isinstance(s.shape, (Window, Point)))


def _given_up(state: CacheState, link: StoreLink | None, match: Match) -> Loss | None:
    """The latest note that some request did not wait for what the store may have of this prompt."""
    if link is None or not link.given_up:
        return None
    known, upto = match.known_tokens // state.spec.page_tokens, match.limit_tokens // state.spec.page_tokens
    root, size = match.namespace.digest, state.tree.page_bytes
    keys = path_keys(root, match.path, match.packed, known=known, upto=upto, page_bytes=size)
    found = [link.given_up[key] for key in keys if key in link.given_up]
    return max(found, key=lambda loss: loss.at_s) if found else None


def _loss_after(state: CacheState, match: Match) -> Loss | None:
    """A note of what once continued the path where it ends now."""
    node: Node | None = match.path[-1] if match.path else state.tree.roots.get(match.namespace.digest)
    if node is None:
        return None
    size = state.tree.page_bytes
    start = match.known_tokens // state.spec.page_tokens * size
    return state.tree.lost.of(node).get(key_of(match.packed[start : start + size]))


def _known_elsewhere(state: CacheState, match: Match) -> bool:
    """Whether another model or adapter has the first page, under the same salt and tenant, so that no tenant learns of others."""
    page, mine = match.packed[: state.tree.page_bytes], match.namespace

    def is_ours(digest: bytes) -> bool:
        other = state.namespaces.get(digest)
        return other is not None and other != mine and (other.salt, other.tenant) == (mine.salt, mine.tenant)

    return any(root.child(page) is not None and is_ours(digest) for digest, root in state.tree.roots.items())


def _arriving_tier(state: CacheState, match: Match) -> Tier | None:
    for node in match.path:
        for run in node.runs:
            if run is not None:
                ids = run.ids[run.ids != ABSENT]
                if (state.arena(run.tier).state[Kind.PREFIX][ids] == FILLING).any():
                    return run.tier
    return None
