"""Who guesses: a draft keeps states of its own beside the model's, in the same pages, and proposes what may come next.

The rows of a draft depend on the tokens up to theirs alone, so that they can be cached with the model's. Decides nothing: whose
tokens are guessed, and whether a guess was right, is said elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec, Point, StateSpec
from stepwell.engine.ops.guarded import Report
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.requests.request import Chunk, Request
from stepwell.tiers.lease import Lease

DRAFT = "draft"  # the state whose rows say whether a token was drafted


class Draft(Protocol):
    reads_stream: bool  # whether `follow` needs what the model's last layer made of each token

    @property
    def kernels(self) -> Report | None:
        """What runs its operations; None where that is what runs the model's."""
        ...

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Guesses `ahead` tokens for each chunk, which is the last token of its request. May write rows from there on."""
        ...

    def follow(self, chunks: Sequence[Chunk], streams: Sequence[torch.Tensor]) -> None:
        """Once the model has computed the chunks: sees to it that every token of them has its row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedDraft:
    """A draft whose memory is not there yet: what it keeps, what names its weights, and how to make it over pages."""

    states: tuple[StateSpec, ...]
    identity: str
    over: Callable[[ModelSpec, Mapping[Kind, torch.Tensor]], Draft]


def check_target(spec: ModelSpec) -> None:
    """Raises ConfigError for a model that cannot take tokens back."""
    if points := [state.name for state in spec.of_shape(Point)]:
        raise ConfigError(
            f"speculation needs a model that can take tokens back, and {', '.join(points)} of {spec.name} changes with every "
            f"token: leave draft off"
        )


def lease_of(request: Request) -> Lease:
    assert request.lease is not None, f"{request} is drafted without a lease"
    return request.lease


def segment_of(chunk: Chunk, tokens: Sequence[int], *, position: int, num_logits: int) -> RequestRows:
    """Some tokens of a chunk's request; prefix pages alone, for drafts have no others."""
    pages = lease_of(chunk.request).prefix_pages
    return RequestRows(tokens=tokens, position=position, prefix_pages=pages, num_logits=num_logits)
