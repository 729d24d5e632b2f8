"""Replays a trace and, before each request, finds how far the cache could resume it and what stops it there.

The cache's own lookup knows what is in memory, the store what is below, and `Past` what ever was. The replay is unchanged:
requests resume at the same tokens as without these lookups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from stepwell.base.prompt import TOKEN_BYTES, PageKey, manifest_key
from stepwell.policy.store_use import Flags, reachable, restore_points
from stepwell.sim.replay import Replay
from stepwell.sim.setup import Setup
from stepwell.sim.trace import Trace, TraceRequest, prompt_of
from stepwell.sim.why import Depths, Reason, ReasonCounts, Verdict
from stepwell.sim.why_past import Past
from stepwell.tiers.lease import Lease
from stepwell.tree.keys import path_keys
from stepwell.tree.match import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Why a whole trace computed what it did, and each of its sessions. Requests without a name are in no session."""

    trace: str
    spec: str
    policy: str
    page_tokens: int
    total: Verdict
    sessions: Mapping[str, Verdict]

    def worst(self, most: int) -> list[tuple[str, Verdict]]:
        """The sessions that computed most tokens again, worst first."""
        again = [(name, verdict) for name, verdict in self.sessions.items() if verdict.again_tokens]
        return sorted(again, key=lambda each: (-each[1].again_tokens, each[0]))[:most]

    def as_json(self, *, worst: int) -> dict[str, object]:
        named = [{"session": name, **verdict.as_json()} for name, verdict in self.worst(worst)]
        about = {"trace": self.trace, "spec": self.spec, "policy": self.policy, "page_tokens": self.page_tokens}
        return {**about, **self.total.as_json(), "sessions": len(self.sessions), "worst_sessions": named}


class Inquiry:
    """One replay with a reason for every token it computes. One thread."""

    def __init__(self, setup: Setup, *, block_tokens: int) -> None:
        assert not setup.whole_blocks, "tokens past a prompt's end have no reason"
        self._spec = setup.spec
        self._block_tokens = block_tokens
        self._past = Past(block_tokens)
        self._serving: TraceRequest | None = None
        self._number = 0
        self._made = 0  # checkpoints, so far
        self.replay = Replay(setup, block_tokens=block_tokens, on_commit=self._committed)

    def serve(self, request: TraceRequest) -> Mapping[Reason, int]:
        """Serves a request and returns why it computed what it did."""
        self._number += 1
        tokens = prompt_of(request, self._block_tokens, number=self._number)
        match = self.replay.cache.lookup(tokens)
        present = self._spec.floor(self._present(match) * self._spec.page_tokens)
        restorable, anchored = self._resumable(request, match, present)
        # What is present was cached and seen, even where two blocks only happen to share a first token that ends a page.
        cached, seen = (max(past.of(request), present) for past in (self._past.cached, self._past.seen))
        self._serving = request
        sources = self.replay.serve(request)
        self._past.seen.add(request, request.prompt_tokens)
        reusable = min(self._spec.floor(seen), self._spec.usable(request.prompt_tokens))
        reasons = Depths(
            resumed=request.prompt_tokens - sources.computed,
            restorable=restorable,
            anchored=anchored,
            present=present,
            cached=min(self._spec.floor(cached), reusable),
            reusable=reusable,
            seen=seen,
            prompt=request.prompt_tokens,
        ).reasons()
        assert sum(reasons.values()) == sources.computed, f"{reasons} do not add up to {sources}"
        return reasons

    # ---- inside -----------------------------------------------------------------------------------

    def _committed(self, lease: Lease) -> None:
        """Notes what the current request has committed."""
        assert self._serving is not None
        self._past.cached.add(self._serving, lease.num_published * self._spec.page_tokens)
        made = self.replay.cache.counters["checkpoints_made"]
        if made > self._made:
            self._past.add_checkpoint(self._serving, lease.position)
        self._made = made

    def _present(self, match: Match) -> int:
        """How many pages of the prompt are in some tier without a gap."""
        known = match.arrived_tokens // self._spec.page_tokens
        store = self.replay.store
        if store is None or match.arrived_tokens == match.limit_tokens:
            return known
        keys = self._keys(match, match.limit_tokens)
        return reachable(known, np.fromiter((key in store for key in keys), np.bool_, len(keys)))

    def _resumable(self, request: TraceRequest, match: Match, present: int) -> tuple[int, int]:
        """The deepest boundary whose states are in some tier, and the deepest whose states ever were, both on present pages."""
        page_tokens, store = self._spec.page_tokens, self.replay.store
        ever = np.zeros(present // page_tokens + 1, np.bool_)
        ever[[boundary // page_tokens for boundary in self._past.checkpoints(request, present)]] = True
        now = np.zeros_like(ever)
        if store is not None and match.restore_tokens < present:
            keys = self._keys(match, present)
            now[[page for page in np.flatnonzero(ever).tolist() if manifest_key(keys[page - 1]) in store]] = True
        return self._deepest(match, present, now), self._deepest(match, present, ever)

    def _deepest(self, match: Match, present: int, has_checkpoint: Flags) -> int:
        page_tokens = self._spec.page_tokens
        above = match.restore_tokens // page_tokens
        points = restore_points(self._spec, above=above, upto=present // page_tokens, has_checkpoint=has_checkpoint)
        return next(points, above) * page_tokens

    def _keys(self, match: Match, upto: int) -> tuple[PageKey, ...]:
        page_tokens = self._spec.page_tokens
        return path_keys(
            match.namespace.digest, match.path, match.packed, known=match.known_tokens // page_tokens, upto=upto // page_tokens,
            page_bytes=page_tokens * TOKEN_BYTES,
        )  # fmt: skip


def explain_trace(trace: Trace, setup: Setup, *, policy: str, on_request: Callable[[], None] | None = None) -> Explained:
    """Serves a whole trace with an empty cache and returns why tokens were computed. Raises TraceError."""
    inquiry = Inquiry(setup, block_tokens=trace.block_tokens)
    total, sessions = ReasonCounts(), defaultdict[str, ReasonCounts](ReasonCounts)
    for request in trace:
        reasons = inquiry.serve(request)
        for tally in (total, sessions[request.session]) if request.session else (total,):
            tally.add(reasons, prompt_tokens=request.prompt_tokens, computed_tokens=sum(reasons.values()))
        if on_request is not None:
            on_request()
    return Explained(
        trace=trace.name,
        spec=setup.spec.name,
        policy=policy,
        page_tokens=setup.spec.page_tokens,
        total=total.verdict(),
        sessions={name: tally.verdict() for name, tally in sessions.items()},
    )
