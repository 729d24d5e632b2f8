"""How deep a request resumes: where its match says, or before that when computing the rest is sooner than loading it.

Decides by measured speeds, and only where that was asked for (`CacheState.compute_while_loading`). Changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stepwell.base.ids import Kind, Tier
from stepwell.policy.loading import WORTH_IT, Race
from stepwell.tiers.state import CacheState
from stepwell.tree.match import Match, find


def soonest(state: CacheState, match: Match) -> Match:
    """The match itself, or the same with a restore point before its own, from which the first token is expected sooner."""
    bytes_per_s, tokens_per_s = state.copies.load_speed.per_s, state.compute_speed.per_s
    if not state.compute_while_loading or not match.host_tokens or bytes_per_s is None or tokens_per_s is None:
        return match
    if state.row_pages is not None:
        return match  # most of what is on the host may stay there
    race = Race(bytes_per_s=bytes_per_s, tokens_per_s=tokens_per_s, overlap=state.copies.may_arrive)
    new_tokens, load_bytes = match.prompt_tokens - match.restore_tokens, _bytes_to_load(state, match)
    count = race.tokens_to_compute(load_bytes=load_bytes, load_tokens=match.host_tokens, new_tokens=new_tokens)
    if count < state.spec.page_tokens:
        return match
    before = find(state.tree, match.namespace, match.packed, match.restore_tokens - count)
    compute_tokens = match.prompt_tokens - before.restore_tokens
    sooner_s = race.first_token_s(load_bytes=_bytes_to_load(state, before), compute_tokens=compute_tokens)
    if sooner_s > WORTH_IT * race.first_token_s(load_bytes=load_bytes, compute_tokens=new_tokens):
        return match
    return replace(
        match,
        restore_tokens=before.restore_tokens,
        device_tokens=before.device_tokens,
        host_tokens=before.host_tokens,
        checkpoint=before.checkpoint,
    )


def _bytes_to_load(state: CacheState, match: Match) -> int:
    pages = match.host_tokens // state.spec.page_tokens
    from_host = match.checkpoint is not None and match.checkpoint.ready_in(Tier.DEVICE) is None
    return pages * state.spec.object_bytes(Kind.PREFIX) + (state.spec.checkpoint_bytes() if from_host else 0)
