"""One long context, computed once by a dense model, and continued any number of times: with any selector, budget and page size.

Knows no texts. Rows of the context are copied into pages of each layout, and the selector's summaries are made of them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.models import checkpoint_of
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.engine.models.attention import Attention
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.registry import build_model
from stepwell.engine.models.selectors import SINKS, Sparse
from stepwell.engine.passes.batch import Batch, RequestRows
from stepwell.engine.passes.pages import DevicePages

CHUNK = 1024
NEVER = 1 << 40  # where a request picks that never does
ROWS = {"kv": Kind.PREFIX, "swa": Kind.WINDOW}


class Pages:
    """Memory of one request for `capacity` tokens, in the order of its tokens."""

    def __init__(self, spec: ModelSpec, capacity: int) -> None:
        self.spec = spec
        self.sizes = {Kind.PREFIX: spec.page_tokens, Kind.WINDOW: spec.window_page_tokens}
        rows = {
            kind: torch.zeros(-(-capacity // size), spec.object_bytes(kind), dtype=torch.uint8)
            for kind, size in self.sizes.items()
            if spec.parts(kind)
        }
        self.pages = DevicePages(spec, rows)

    def forward(
        self, model: Decoder, runs: Sequence[Sequence[int]], position: int, picks_from: int, *, logits: bool
    ) -> list[torch.Tensor]:  # fmt: skip
        """Runs that all begin at `position`, a boundary of pages, and look at the same tokens before it. Each has pages behind it
        for itself, `capacity` tokens being enough for one after the other. Logits of every token, or of each last one.
        """
        segments, used = [], {kind: position // size for kind, size in self.sizes.items()}
        for tokens in runs:
            ids = {}
            for kind, size in self.sizes.items():
                more = -(-len(tokens) // size)
                ids[kind] = np.r_[: position // size, used[kind] : used[kind] + more].astype(np.int32)
                used[kind] += more
            pages = {"prefix_pages": ids[Kind.PREFIX], "window_pages": ids[Kind.WINDOW]}
            segments.append(RequestRows(tokens=tokens, position=position, **pages, picks_from=picks_from))
        made = model.forward(Batch(segments, self.pages, device="cpu", every_token=logits))
        return list(made.split([len(tokens) if logits else 1 for tokens in runs]))

    def by_token(self, state: str) -> torch.Tensor:
        """All rows of a state `[L, T, E]`, a copy."""
        return self.pages.state_PLRE(state).transpose(0, 1).flatten(1, 2).clone()

    def fill(self, state: str, row_LTE: torch.Tensor) -> None:
        there = self.pages.state_PLRE(state)
        tokens = min(there.shape[0] * there.shape[2], row_LTE.shape[1])
        token = torch.arange(tokens)
        there[token // there.shape[2], :, token % there.shape[2]] = row_LTE[:, :tokens].transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Tokens, and what a dense model keeps of them."""

    model: str
    tokens: Sequence[int]
    rows: dict[str, torch.Tensor]

    @classmethod
    def compute(cls, name: str, tokens: Sequence[int]) -> Context:
        model = built(name, None, page_tokens=64)
        pages = Pages(model.spec, len(tokens))
        for start in range(0, len(tokens), CHUNK):
            pages.forward(model, [tokens[start : start + CHUNK]], start, NEVER, logits=False)
        rows = {state.name: pages.by_token(state.name)[:, : len(tokens)] for state in model.spec.states}
        return cls(model=name, tokens=tokens, rows=rows)

    def over(self, model: Decoder, more: int) -> Pages:
        """The context in pages as `model` has them, its summaries too, with room for so many tokens more."""
        pages, length = Pages(model.spec, len(self.tokens) + more), len(self.tokens)
        for state, row_LTE in self.rows.items():
            pages.fill(state, row_LTE)
        selector = model.selector
        if selector is not None:
            assert length % model.spec.page_tokens == 0, f"{length} tokens are no whole pages"
            count = length // model.spec.page_tokens
            row_PLRE = pages.pages.state_PLRE("kv")[:count]
            state_PLRC = pages.pages.state_PLRE(selector.state)
            key_PLRKD = row_PLRE.unflatten(3, (selector.kv_heads, -1))[..., : selector.key_dim]
            key_UXKD = key_PLRKD.flatten(0, 1).unflatten(1, (-1, selector.summary.unit)).flatten(0, 1)
            state_PLRC[:count] = selector.summary.make(key_UXKD).view_as(state_PLRC[:count])
        return pages


def built(name: str, selector: str | None, *, page_tokens: int) -> Decoder:
    checkpoint = checkpoint_of(name)
    sparse = None if selector is None else Sparse(selector=selector, budget=1 << 20)
    return build_model(checkpoint.config, checkpoint.source, page_tokens=page_tokens, sparse=sparse)


def with_budget(model: Decoder, budget: int, *, window: bool = False) -> Decoder:
    """The same model with another budget. `window`: nothing is chosen; it looks at the first tokens and at the last ones."""
    assert model.selector is not None
    selector = replace(model.selector, count=budget)
    if window:
        selector = replace(selector, recent=budget - SINKS)
    layers = []
    for layer in model.layers:
        attention = layer.attention  # type: ignore[attr-defined]
        assert isinstance(attention, Attention)
        picks = attention.selector is not None
        layers.append(replace(layer, attention=replace(attention, selector=selector)) if picks else layer)  # type: ignore[type-var]
    return replace(model, layers=layers, selector=selector)
