"""Turns a batch of prompts into a cache object: leases at one restore point, loads, computes the rest, commits.

Copies run between host memory and staged pages: packed pages next to the model, which plans name as the engine's pages. A copy
has finished when its call returns. On CUDA copies use pinned memory, one page each. One batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from stepwell.base.errors import LoadFailed
from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import Namespace
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Plan
from stepwell.cache.facade import Cache
from stepwell.connectors.transformers.model_pass import ModelPass
from stepwell.connectors.transformers.past_layout import PastLayout
from stepwell.tiers.external import EnginePages
from stepwell.tiers.lease import Lease
from stepwell.transfer.copy_engine import Work
from stepwell.transfer.torch_memory import TorchMemory

Staged = Mapping[Kind, torch.Tensor]  # `[B, N, byte]`: N pages of a kind for each of B prompts


class StagedCopyEngine:
    """The copy engine of one rank: host memory, and the pages staged now."""

    def __init__(self, host: TorchMemory) -> None:
        self._host = host
        self._staged: dict[Kind, torch.Tensor] = {}

    @contextmanager
    def staging(self, staged: Staged) -> Iterator[None]:
        """Plans that begin within refer to these pages: page `n` of prompt `b` is number `b * N + n`."""
        self._staged = {kind: pages_BNX.flatten(0, 1) for kind, pages_BNX in staged.items()}
        try:
            yield
        finally:
            self._staged = {}

    def begin(self, plan: Plan) -> Work:
        return partial(self._run, plan)

    def _run(self, plan: Plan) -> None:
        for copy in plan.copies:
            if len(copy.source.ids):
                self._copy(copy)
        devices = {pages.device for pages in self._staged.values() if pages.device.type == "cuda"}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _copy(self, copy: Copy) -> None:
        source, target = (self._pages(span.tier, span.kind) for span in (copy.source, copy.target))
        for ids, pages in ((copy.source.ids, source), (copy.target.ids, target)):
            if ids.min() < 0 or ids.max() >= len(pages):
                raise IndexError(f"pages {ids.min()} to {ids.max()} were named, and there are {len(pages)}")
        for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
            target[write].copy_(source[read], non_blocking=True)

    def _pages(self, tier: Tier, kind: Kind) -> torch.Tensor:
        return self._staged[kind] if tier is Tier.ENGINE else self._host.rows(kind)


def names(staged: Staged, prompt: int, *, first_page: int = 0) -> EnginePages:
    """The page numbers of one prompt's staged pages. Pages before `first_page` are not staged."""
    found = {kind: _names(pages_BNX, prompt) for kind, pages_BNX in staged.items()}
    return EnginePages(
        prefix=found.get(Kind.PREFIX, NO_PAGES),
        windows=found.get(Kind.WINDOW, NO_PAGES),
        points=found.get(Kind.POINT, NO_PAGES),
        first_page=first_page,
    )


def _names(pages_BNX: torch.Tensor, prompt: int) -> PageIds:
    count = pages_BNX.shape[1]
    return np.arange(prompt * count, (prompt + 1) * count, dtype=np.int32)


CHUNK_TOKENS = 2048  # most tokens in a pass
LOADS_TRIED = 2  # failed loads of a batch before it is computed

Batch = list[list[int]]  # tokens of prompts of one length


class Prefilled(NamedTuple):
    past: Any  # the cache object for the model
    cached: int  # tokens of each prompt that were not computed


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
        """A cache object that covers all prompts up to the last boundary before their last token."""
        with ExitStack() as held:
            leases, past = self._resume(prompts, namespace, held)
            self._compute(ids_BT, past, leases, self._layout.spec.usable(ids_BT.shape[1]))
            return Prefilled(past, leases[0].resume)

    # ---- resuming -----------------------------------------------------------------------------------

    def _resume(self, prompts: Batch, namespace: Namespace, held: ExitStack) -> tuple[list[Lease], Any]:
        """Leases for all prompts at one restore point, and a cache object loaded from there."""
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
        while True:  # find the deepest restore point that all prompts have
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
        """A cache object loaded up to the restore point. Raises LoadFailed."""
        past, boundary = self._passes.new_past(), leases[0].resume
        if boundary:
            staged = self._layout.empty_pages(len(leases), boundary)
            with self._copies.staging(staged):
                for prompt, lease in enumerate(leases):
                    self._cache.load(lease, names(staged, prompt))
                    self._cache.wait(lease)
            self._layout.unpack(past, boundary, staged)
        return past

    # ---- computing ----------------------------------------------------------------------------------

    def _compute(self, ids_BT: torch.Tensor, past: Any, leases: Sequence[Lease], last: int) -> None:
        """Runs the model over the rest of all prompts up to `last`, in passes that end at stops, and commits after each.

        Once the host has no space for a prompt, the rest is computed without being saved.
        """
        position, has_space = leases[0].resume, True
        while position < last:
            stops = [self._cache.next_stop(lease) or last for lease in leases] if has_space else []
            upto = min(last, (position // self._chunk_tokens + 1) * self._chunk_tokens, *stops)
            self._passes.run(ids_BT[:, position:upto], past)
            has_space = has_space and self._commit(past, leases, upto, checkpoint=upto in stops)
            position = upto

    def _commit(self, past: Any, leases: Sequence[Lease], upto: int, *, checkpoint: bool) -> bool:
        """Saves the new pages of all prompts; false if there was no space for one of them."""
        first = min(self._cache.first_unsaved(lease) for lease in leases)  # includes pages whose copy failed
        staged = {Kind.PREFIX: self._layout.pack_prefix(past, range(first, upto // self._layout.spec.page_tokens))}
        if checkpoint:
            staged |= self._layout.pack_checkpoint(past, upto)
        if self._passes.device.type == "cuda":
            torch.cuda.synchronize(self._passes.device)  # commits time the passes
        taken = []
        with self._copies.staging(staged):
            for prompt, lease in enumerate(leases):
                taken.append(self._cache.commit(lease, upto, source=names(staged, prompt, first_page=first)))
                self._cache.wait(lease)
        self._cache.step()
        return all(taken)
