"""A draft that is a layer of the model's own checkpoint: it continues from the model's hidden state of the token before.

    draft row of token j    from hidden j-1 (the model's) and token j; so it depends on the tokens up to j alone
    token 0                 has none: nothing came before it. Its row is zeros, and is never read
    guesses                 continue from the layer's own hidden states; rows are written again once the model has computed them

The hidden state of the last token is kept while a request runs; to resume at any page, each page keeps that of its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepwell.base.ids import Kind
from stepwell.base.spec.families import from_config
from stepwell.engine.drafts.base import LoadedDraft, lease_of, segment_of
from stepwell.engine.loading.weights import TensorSource
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.mtp import MtpLayer, load_mtp
from stepwell.engine.ops.guarded import Report
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.numbers import Send
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.requests.request import Chunk
from stepwell.tiers.lease import Lease

MTP = "mtp"  # in place of a checkpoint's name
HIDDEN = "draft_hidden"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hidden:
    """The model's hidden states of some of a request's tokens, from `start` on."""

    start: int
    rows_NC: torch.Tensor


def load_own_layer(
    config: Mapping[str, object], source: TensorSource, target: Decoder, *, dtype: str, kv_dtype: str | None
) -> LoadedDraft:
    """The layer after the model's last. Raises ConfigError (SpecError) for a model without one."""
    whole = from_config(config, kv_dtype=kv_dtype or dtype, model_dtype=dtype, page_tokens=target.spec.page_tokens, draft=True)
    whole = whole.for_ranks(target.ranks.size)
    states = whole.states[len(target.spec.states) :]
    spec = replace(whole, states=states, schedule=())  # its layer comes after those of the model
    layer = load_mtp(config, source, target, spec)
    return LoadedDraft(
        states=states,
        identity=MTP,
        over=lambda inside, rows: OwnLayerDraft(layer, DevicePages(spec, rows, inside=inside), target.kernels.send),
    )


class OwnLayerDraft:
    reads_stream = True
    kernels: Report | None = None  # the model's

    def __init__(self, layer: MtpLayer, pages: DevicePages, send: Send) -> None:
        self._layer = layer
        self._send = send
        self._pages = pages
        self._hidden: WeakKeyDictionary[Lease, Hidden] = WeakKeyDictionary()

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in chunks]
        before = {at: self._before(chunk) for at, chunk in enumerate(chunks) if chunk.ahead}
        for step in range(max(chunk.ahead for chunk in chunks)):
            going = [at for at, chunk in enumerate(chunks) if step < chunk.ahead]
            segments = [
                segment_of(
                    chunks[at],
                    guesses[at][-1:] or chunks[at].request.tokens[-1:],
                    position=chunks[at].request.position + step,
                    num_logits=1,
                )
                for at in going
            ]
            hidden_NC, logits = self._layer(self._batch(segments), torch.stack([before[at] for at in going]))
            before = dict(zip(going, hidden_NC, strict=True))
            for at, token in zip(going, logits.argmax(dim=-1).tolist(), strict=True):
                guesses[at].append(token)
        return guesses

    def follow(self, chunks: Sequence[Chunk], streams: Sequence[torch.Tensor]) -> None:
        hidden = [self._layer.read(stream_NC) for stream_NC in streams]
        pieces = [self._piece(chunk, rows_NC) for chunk, rows_NC in zip(chunks, hidden, strict=True)]
        pieces = sorted((piece for piece in pieces if len(piece[1])), key=lambda piece: len(piece[1]) > 1)  # singles first
        if pieces:
            self._layer(self._batch([segment for segment, _ in pieces]), torch.cat([before_NC for _, before_NC in pieces]))
        for chunk, rows_NC in zip(chunks, hidden, strict=True):
            self._keep(chunk, rows_NC)

    # ---- inside -----------------------------------------------------------------------------------

    def _batch(self, segments: Sequence[RequestRows]) -> Batch:
        return Batch(segments, self._pages, device=self._layer.device, dtype=self._layer.dtype, first_seen=1, send=self._send)

    def _piece(self, chunk: Chunk, hidden_NC: torch.Tensor) -> tuple[RequestRows, torch.Tensor]:
        """A chunk's tokens, without token 0, and the hidden states of the tokens before each."""
        position = chunk.request.position
        tokens = [*chunk.request.tokens[position : chunk.end], *chunk.proposed]
        if position:
            before_NC = torch.cat([self._before(chunk)[None], hidden_NC[:-1]])
            return segment_of(chunk, tokens, position=position, num_logits=0), before_NC
        self._pages.clear(Kind.PREFIX, [int(lease_of(chunk.request).prefix_pages[0])])
        return segment_of(chunk, tokens[1:], position=1, num_logits=0), hidden_NC[:-1]

    def _before(self, chunk: Chunk) -> torch.Tensor:
        """The hidden state of the token before a chunk: from the last pass, or from the last page it resumed from."""
        lease = lease_of(chunk.request)
        held = self._hidden.get(lease)
        if held is not None:
            return held.rows_NC[lease.position - 1 - held.start]
        assert lease.position == lease.resume > 0, f"no pass of {lease} was followed"
        page = int(lease.prefix_pages[lease.position // self._pages.spec.page_tokens - 1])
        return self._pages.state_PLRE(HIDDEN)[page, 0, 0].to(self._layer.dtype)

    def _keep(self, chunk: Chunk, hidden_NC: torch.Tensor) -> None:
        """Hidden states for the pass to come, and in the pages whose last tokens are among them."""
        lease, page_tokens = lease_of(chunk.request), self._pages.spec.page_tokens
        first = 0 if chunk.decodes else len(hidden_NC) - 1  # after guesses it is not known yet which token is the last
        self._hidden[lease] = Hidden(start=lease.position + first, rows_NC=hidden_NC[first:].clone())
        ends = np.arange(len(hidden_NC))[(np.arange(lease.position, lease.position + len(hidden_NC)) + 1) % page_tokens == 0]
        if len(ends):
            state_PLRE = self._pages.state_PLRE(HIDDEN)
            pages = torch.from_numpy(lease.prefix_pages[(lease.position + ends) // page_tokens].astype(np.int64))
            rows_NC = hidden_NC[torch.from_numpy(ends).to(hidden_NC.device)]
            state_PLRE[pages.to(state_PLRE.device), 0, 0] = rows_NC.to(state_PLRE.dtype)
