"""States of fixed size in pages that lie anywhere, and tokens for one layer over them: what recurrences are compared on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.shapes import Point
from stepwell.base.spec.states import StateSpec
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import FOREVER, Steps, Tokens
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows

LAYERS, LAYER = 3, 1
WIDTHS = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer and a batch: the `lengths` of its segments, singles first, and which of them start at token 0.

    `rule` is head (a delta net's), channel (Kimi's) or time (Mamba-2's).
    """

    rule: str = "head"
    keys: int = 2
    heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    window: int = 4
    channels: int = 40
    lengths: tuple[int, ...] = (1, 1, 5)
    fresh: tuple[bool, ...] = (False, True, False)
    kept: str = "fp32"


def random_shape(seed: int, *, widths: tuple[int, ...] = (8, 16, 24), most: int = 150) -> Shape:
    draw = Random(seed)
    keys, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    singles, runs = draw.randrange(4), draw.randrange(3)
    lengths = (1,) * singles + tuple(draw.choice([2, 3, 63, 64, 65, draw.randrange(2, most)]) for _ in range(runs)) or (1,)
    return Shape(
        rule=draw.choice(["head", "channel", "time"]),
        keys=keys,
        heads=keys * group,
        key_dim=draw.choice(widths),
        value_dim=draw.choice(widths),
        window=draw.choice([2, 3, 4]),
        channels=draw.choice([5, 256, 300]),
        lengths=lengths,
        fresh=tuple(draw.random() < 0.4 for _ in lengths),
        kept=draw.choice(["fp32", "fp32", "bf16"]),
    )


class Scene:
    """Unassigned pages hold NaN, and so do those of segments that start. Two scenes of one seed hold the same."""

    def __init__(self, shape: Shape, seed: int = 0, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.random = torch.Generator().manual_seed(seed)
        sizes = {"ssm": shape.heads * shape.key_dim * shape.value_dim, "conv": shape.window * shape.channels}
        states = tuple(
            StateSpec(name=name, shape=Point(), layers=LAYERS, row_bytes=size * WIDTHS[shape.kept], dtype=shape.kept)
            for name, size in sizes.items()
        )
        spec, count = ModelSpec(name="points", states=states), len(shape.lengths) + 2
        self.pages = DevicePages(
            spec, {Kind.POINT: torch.full((count, spec.object_bytes(Kind.POINT)), 255, dtype=torch.uint8).to(device)}
        )
        self.ids = Random(seed).sample(range(count), len(shape.lengths))
        for name, size in sizes.items():
            state_PLRE = self.pages.state_PLRE(name)
            for page, fresh in zip(self.ids, shape.fresh, strict=True):
                numbers = self.numbers(LAYERS, 1, size)
                if not fresh:
                    state_PLRE[page] = numbers.to(state_PLRE.dtype).to(device)
        self.batch = self.batch_of(shape.fresh)

    def batch_of(self, fresh: tuple[bool, ...]) -> Batch:
        nothing = torch.empty(0).numpy()
        segments = [
            RequestRows(tokens=[0] * length, position=0 if starts else 7, prefix_pages=nothing, point_page=page)
            for length, starts, page in zip(self.shape.lengths, fresh, self.ids, strict=True)
        ]
        return Batch(segments, self.pages, device=self.device, dtype=self.dtype)

    @property
    def points(self) -> Points:
        return Points.of(self.batch)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def made(self, *shape: int) -> torch.Tensor:
        return self.numbers(*shape).to(self.dtype).to(self.device)

    def tokens(self, *, strength: float = 1.0) -> Tokens:
        """Queries, keys and values side by side, as a convolution leaves them; so are steps and betas."""
        shape, count = self.shape, sum(self.shape.lengths)
        keys, values = shape.keys * shape.key_dim, shape.heads * shape.value_dim
        query, key, value = self.made(count, 2 * keys + values).split((keys, keys, values), dim=1)
        by_channel = shape.rule == "channel"
        rates = shape.heads * (shape.key_dim if by_channel else 1)
        raw, beta, _ = self.made(count, rates + shape.heads + 3).split((rates, shape.heads, 3), dim=1)
        per_head = (shape.heads, shape.key_dim) if by_channel else (shape.heads,)
        rate = -self.numbers(shape.heads).exp() * strength
        is_delta = shape.rule != "time"
        return Tokens(
            query_NKD=query.unflatten(1, (shape.keys, shape.key_dim)),
            key_NKD=key.unflatten(1, (shape.keys, shape.key_dim)),
            value_NHV=value.unflatten(1, (shape.heads, shape.value_dim)),
            steps=Steps(
                raw=raw.unflatten(1, per_head) if by_channel else raw,
                bias=self.numbers(*per_head).sub(2.0).to(self.device),
                rate=(rate[:, None] if by_channel else rate).to(self.device),
                limits=FOREVER if is_delta else (0.01, 0.9),
            ),
            beta_NH=beta if is_delta else None,
            skip_H=None if is_delta else self.numbers(shape.heads).to(self.device),
        )
