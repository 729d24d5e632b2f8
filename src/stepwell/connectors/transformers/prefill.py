"""How a batch of prompts becomes a cache object: leased at one restore point, loaded, computed on, committed.

One batch at a time. Knows nothing of weights or settings; what it is given is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from stepwell.base.errors import LoadFailed
from stepwell.base.ids import Kind
from stepwell.base.prompt import Namespace
from stepwell.cache.facade import Cache
from stepwell.connectors.transformers.model_pass import ModelPass
from stepwell.connectors.transformers.past_layout import PastLayout
from stepwell.connectors.transformers.staged_copies import StagedCopyEngine, names
from stepwell.tiers.lease import Lease

CHUNK_TOKENS = 2048  # computed in one pass at most
LOADS_TRIED = 2  # of one batch, before it is computed instead

Batch = list[list[int]]  # tokens of prompts of one length


class Prefilled(NamedTuple):
    past: Any  # what the model takes as its cache object
    cached: int  # tokens of each prompt that it covers and that were not computed


class Prefill:
    """Prompts over one cache, computed by one model."""

    def __init__(
        self, cache: Cache, passes: ModelPass, layout: PastLayout, copies: StagedCopyEngine, *, chunk_tokens: int
    ) -> None:  # fmt: skip
        self._cache = cache
        self._passes = passes
        self._layout = layout
        self._copies = copies
        self._chunk_tokens = layout.spec.floor(chunk_tokens)

    def run(self, prompts: Batch, ids_BT: torch.Tensor, namespace: Namespace) -> Prefilled:
        """A cache object that covers all prompts up to the last boundary that leaves a token of them."""
        with ExitStack() as held:
            leases, past = self._resume(prompts, namespace, held)
            self._compute(ids_BT, past, leases, self._layout.spec.usable(ids_BT.shape[1]))
            return Prefilled(past, leases[0].resume)

    # ---- resuming -----------------------------------------------------------------------------------

    def _resume(self, prompts: Batch, namespace: Namespace, held: ExitStack) -> tuple[list[Lease], Any]:
        """Leases for all prompts, at one restore point, and a cache object with what they hold there."""
        for limit in [*[None] * LOADS_TRIED, 0]:
            with ExitStack() as trying:
                leases = self._lease(prompts, namespace, limit, trying)
                try:
                    past = self._load(leases)
                except LoadFailed:
                    continue
                held.push(trying.pop_all())
                return leases, past
        raise AssertionError("a prompt that resumes at 0 loads nothing")

    def _lease(self, prompts: Batch, namespace: Namespace, limit: int | None, held: ExitStack) -> list[Lease]:
        cache = self._cache
        matches = [cache.lookup(tokens, namespace=namespace, limit_tokens=limit) for tokens in prompts]
        tickets = [held.enter_context(cache.prefetch(match)) for match in matches]
        for ticket in tickets:
            cache.wait(ticket)
        depth: int | None = None
        while True:  # the deepest restore point that all of them have: each is asked for its own before the least of theirs
            found = [
                cache.lookup(tokens, namespace=namespace, limit_tokens=limit if depth is None else depth) for tokens in prompts
            ]
            depths = {match.restore_tokens for match in found}
            if len(depths) == 1:
                break
            depth = min(depths)
        pairs = zip(found, tickets, strict=True)
        leases = [held.enter_context(cache.acquire(match, ticket=ticket)) for match, ticket in pairs]
        assert {lease.resume for lease in leases} == depths, f"{leases} do not resume at {depths}"
        return leases

    def _load(self, leases: Sequence[Lease]) -> Any:
        """A cache object with everything up to where the leases resume. Raises LoadFailed."""
        past, boundary = self._passes.new_past(), leases[0].resume
        if boundary:
            staged = self._layout.room(len(leases), boundary)
            with self._copies.staging(staged):
                for prompt, lease in enumerate(leases):
                    self._cache.load(lease, names(staged, prompt))
                    self._cache.wait(lease)
            self._layout.unpack(past, boundary, staged)
        return past

    # ---- computing ----------------------------------------------------------------------------------

    def _compute(self, ids_BT: torch.Tensor, past: Any, leases: Sequence[Lease], last: int) -> None:
        """Runs the model over the rest of all prompts up to `last`, in passes that end at stops, and commits after each.

        Once the host has no room for a prompt it is computed without being saved: what follows would find none either.
        """
        position, has_room = leases[0].resume, True
        while position < last:
            stops = [self._cache.next_stop(lease) or last for lease in leases] if has_room else []
            upto = min(last, (position // self._chunk_tokens + 1) * self._chunk_tokens, *stops)
            self._passes.run(ids_BT[:, position:upto], past)
            has_room = has_room and self._commit(past, leases, upto, checkpoint=upto in stops)
            position = upto

    def _commit(self, past: Any, leases: Sequence[Lease], upto: int, *, checkpoint: bool) -> bool:
        """Saves what is new of all prompts; false when there was no room for one of them."""
        first = min(self._cache.first_unsaved(lease) for lease in leases)  # those whose copy failed are offered again
        staged = {Kind.PREFIX: self._layout.pack_prefix(past, range(first, upto // self._layout.spec.page_tokens))}
        if checkpoint:
            staged |= self._layout.pack_checkpoint(past, upto)
        if self._passes.device.type == "cuda":
            torch.cuda.synchronize(self._passes.device)  # commits measure how long passes take
        taken = []
        with self._copies.staging(staged):
            for prompt, lease in enumerate(leases):
                taken.append(self._cache.commit(lease, upto, source=names(staged, prompt, first_page=first)))
                self._cache.wait(lease)
        self._cache.step()
        return all(taken)
