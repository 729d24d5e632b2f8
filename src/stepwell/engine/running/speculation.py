"""Speculative decoding, several tokens in one pass: a draft guesses, the model verifies all guesses at once; its choice counts.

    rows of a draft    |====== written ======|xxxx marked: not drafted xxxx|

A request has guesses for as long as the draft's rows of its tokens are complete. Once some are missing (its pages came without,
or too many requests were decoding), it continues without guesses, one token a pass: slower, and otherwise the same. Missing rows
are marked in the rows themselves, with bytes that no number has, so that the mark travels with the page through every tier. One
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec import Prefix, StateSpec
from stepwell.cache.facade import Cache
from stepwell.engine.drafts.base import DRAFT, Draft, lease_of
from stepwell.engine.ops.guarded import Report
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.requests.request import Chunk, Request
from stepwell.engine.running.runner import Runner
from stepwell.tiers.lease import Lease

MARK = 0xFF  # in every byte of a row: not a number, in all formats
LOOKED_AT = 8  # bytes of a row that show the mark


class Speculation:
    """Requests with a draft, and the draft. `pages` are those that model and draft share, `states` the draft's states in them."""

    def __init__(
        self, draft: Draft, cache: Cache, pages: DevicePages, states: Sequence[StateSpec], *, tokens: int, max_running: int
    ) -> None:
        if tokens < 1 or max_running < 1:
            raise ConfigError(f"draft_tokens and draft_max_running must be at least 1, got {tokens} and {max_running}")
        self._draft = draft
        self._cache = cache
        self._pages = pages
        self._states = states
        self._tokens = tokens
        self._max_running = max_running
        self._whole: WeakKeyDictionary[Lease, bool] = WeakKeyDictionary()  # whether all rows of its tokens are there

    @property
    def kernels(self) -> Report | None:
        """What runs the draft's operations; None if it is the same as for the model's."""
        return self._draft.kernels

    def ahead(self, request: Request, decoding: int) -> int:
        """The number of tokens to guess for a request, given the number of decoding ones. None before its answer has begun."""
        if decoding > self._max_running or not request.answer_tokens or not self._drafts(request):
            return 0
        return min(self._tokens, request.max_tokens - request.answer_tokens - 1)

    def run(self, chunks: Sequence[Chunk], runner: Runner) -> tuple[Sequence[Chunk], torch.Tensor]:
        """One pass with guesses: the chunks with what was proposed in them, and the model's logits for all of it."""
        chunks = self._propose(chunks)
        streams: list[torch.Tensor] = []
        logits = runner.run(chunks, streams.append) if self._draft.reads_stream else runner.run(chunks)
        drafted = [self._drafts(chunk.request) for chunk in chunks]
        pieces = streams[0].split([chunk.size for chunk in chunks]) if streams else [logits[:0]] * len(chunks)
        chosen = [(chunk, piece) for chunk, piece, wanted in zip(chunks, pieces, drafted, strict=True) if wanted]
        if chosen:
            self._draft.follow([chunk for chunk, _ in chosen], [piece for _, piece in chosen])
        self._mark([chunk for chunk, wanted in zip(chunks, drafted, strict=True) if not wanted])
        return chunks, logits

    # ---- inside -----------------------------------------------------------------------------------

    def _propose(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        decoding = [chunk for chunk in chunks if chunk.decodes]
        if len(decoding) > self._max_running:
            self._pause(decoding)
        drafted = [chunk for chunk in decoding if self._drafts(chunk.request)]
        if not drafted:
            return chunks
        guesses = {chunk.request.id: tuple(made) for chunk, made in zip(drafted, self._draft.propose(drafted), strict=True)}
        made = [replace(chunk, proposed=guesses.get(chunk.request.id, ())) for chunk in chunks]
        assert all(len(chunk.proposed) == chunk.ahead for chunk in made), f"a draft lacks guesses: {guesses}"
        return made

    def _pause(self, chunks: Sequence[Chunk]) -> None:
        """With many requests a pass is full without guesses. Their rows will have a gap, and guessing ends there."""
        for chunk in chunks:
            if self._drafts(chunk.request):
                lease = lease_of(chunk.request)
                self._whole[lease] = False
                self._cache.note_missing_state(lease, DRAFT, since=lease.position)
                self._cache.counters.add("draft_paused")

    def _drafts(self, request: Request) -> bool:
        """Whether a request has guesses; checks a lease's pages once."""
        lease = lease_of(request)
        if lease not in self._whole:
            missing = self._first_missing(lease)
            self._whole[lease] = missing is None and request.submitted.speculate
            if missing is not None and request.submitted.speculate:
                self._cache.counters.add("draft_missing")
            if not self._whole[lease]:
                self._cache.note_missing_state(lease, DRAFT, since=lease.resume if missing is None else missing)
        return self._whole[lease]

    def _first_missing(self, lease: Lease) -> int | None:
        """The first token before the lease's restore point that was not drafted."""
        pages = torch.from_numpy(lease.prefix_pages[: lease.resume // self._pages.spec.page_tokens].astype(np.int64))
        rows_PRB = self._pages.bytes_PLRB(DRAFT)[:, 0, :, :LOOKED_AT]
        marked_T = (rows_PRB[pages.to(rows_PRB.device)] == MARK).all(dim=-1).flatten()
        return int(marked_T.int().argmax()) if marked_T.any() else None

    def _mark(self, chunks: Sequence[Chunk]) -> None:
        """Marks the rows of these tokens as not drafted."""
        page_tokens = self._pages.spec.page_tokens
        for state in self._states if chunks else ():
            assert isinstance(state.shape, Prefix), state
            ratio, slots = state.shape.ratio, []
            for chunk in chunks:
                tokens = np.arange(chunk.request.position, chunk.end)
                tokens = tokens[(tokens + 1) % ratio == 0]  # where a row is complete
                slots.append(
                    np.stack([lease_of(chunk.request).prefix_pages[tokens // page_tokens], tokens % page_tokens // ratio])
                )
            bytes_PLRB = self._pages.bytes_PLRB(state.name)
            page_N, row_N = torch.from_numpy(np.concatenate(slots, axis=1).astype(np.int64)).to(bytes_PLRB.device)
            bytes_PLRB[page_N, :, row_N] = MARK
