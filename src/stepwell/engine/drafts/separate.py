"""A draft that is a model of its own, usually a much smaller one. It runs over the same tokens as the model, ahead of it.

tokens     ... last | guess | guess |
steps          last -> guess -> guess -> (its row alone)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec import Prefix
from stepwell.engine.drafts.base import DRAFT, LoadedDraft, segment_of
from stepwell.engine.models.base import Decoder
from stepwell.engine.ops.guarded import Report
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.requests.request import Chunk


def load_separate(draft: Decoder, target: Decoder, identity: str) -> LoadedDraft:
    """A model as the draft of another. Its states are renamed, so that both fit in a page. Raises ConfigError."""
    spec = draft.spec
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft has a vocabulary of {draft.vocab_size} and the model one of {target.vocab_size}: they must be the same"
        )
    if others := [state.name for state in spec.states if state.shape != Prefix()]:
        raise ConfigError(
            f"a draft must keep a row for each token and nothing else, and {spec.name} also has {', '.join(others)}: choose a "
            f"model with full attention in all layers"
        )
    names = {state.name: f"{DRAFT}_{state.name}" if at else DRAFT for at, state in enumerate(spec.states)}
    return LoadedDraft(
        states=tuple(replace(state, name=names[state.name], required=False) for state in spec.states),
        identity=identity,
        over=lambda whole, rows: SeparateDraft(draft, DevicePages(spec, rows, inside=whole, names=names)),
    )


class SeparateDraft:
    reads_stream = False

    def __init__(self, model: Decoder, pages: DevicePages) -> None:
        self._model = model
        self._pages = pages

    @property
    def kernels(self) -> Report | None:
        return self._model.kernels.report

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """One step more than there are guesses: the last writes the row of the last guess, which may be right."""
        guesses: list[list[int]] = [[] for _ in chunks]
        for step in range(max(chunk.ahead for chunk in chunks) + 1):
            going = [(chunk, made) for chunk, made in zip(chunks, guesses, strict=True) if step <= chunk.ahead]
            segments = [
                segment_of(
                    chunk,
                    made[-1:] or chunk.request.tokens[-1:],
                    position=chunk.request.position + step,
                    num_logits=int(step < chunk.ahead),
                )
                for chunk, made in going
            ]
            found = iter(self._forward(segments).argmax(dim=-1).tolist())
            for chunk, made in going:
                if step < chunk.ahead:
                    made.append(next(found))
        return guesses

    def follow(self, chunks: Sequence[Chunk], streams: Sequence[torch.Tensor]) -> None:
        """Prompts; the rows of what was proposed are there already."""
        segments = [
            segment_of(
                chunk,
                chunk.request.tokens[chunk.request.position : chunk.end],
                position=chunk.request.position,
                num_logits=0,
            )
            for chunk in chunks
            if not chunk.decodes
        ]
        if segments:
            self._forward(segments)

    def _forward(self, segments: Sequence[RequestRows]) -> torch.Tensor:
        model = self._model
        return model.forward(Batch(segments, self._pages, device=model.device, dtype=model.dtype, send=model.kernels.send))
