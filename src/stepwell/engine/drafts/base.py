"""Drafts: each keeps its own states in the pages of the model, and proposes the next tokens.

The rows of a draft depend only on the tokens up to theirs, so that they can be cached with the model's. A draft decides nothing:
`running/speculation.py` says for which requests it guesses, and which guesses were right.
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
    reads_stream: bool  # whether `follow` needs the output of the model's last layer for each token

    @property
    def kernels(self) -> Report | None:
        """The report of its kernels; None if they are the model's."""
        ...

    def propose(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Guesses `ahead` tokens for each chunk, which is the last token of its request. May write rows from there on."""
        ...

    def follow(self, chunks: Sequence[Chunk], streams: Sequence[torch.Tensor]) -> None:
        """Writes the missing rows of the chunks' tokens, once the model has computed them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedDraft:
    """A draft without memory yet: its states, the identity of its weights, and how to make it over pages."""

    states: tuple[StateSpec, ...]
    identity: str
    over: Callable[[ModelSpec, Mapping[Kind, torch.Tensor]], Draft]


def check_target(spec: ModelSpec) -> None:
    """Raises ConfigError for a model that cannot undo tokens."""
    if points := [state.name for state in spec.of_shape(Point)]:
        raise ConfigError(
            f"speculation needs a model that can undo tokens, and {', '.join(points)} of {spec.name} changes with every "
            f"token: leave draft off"
        )


def lease_of(request: Request) -> Lease:
    assert request.lease is not None, f"{request} is drafted without a lease"
    return request.lease


def segment_of(chunk: Chunk, tokens: Sequence[int], *, position: int, num_logits: int) -> RequestRows:
    """Some tokens of a chunk's request; prefix pages alone, for drafts have no others."""
    pages = lease_of(chunk.request).prefix_pages
    return RequestRows(tokens=tokens, position=position, prefix_pages=pages, num_logits=num_logits)
