"""Pages with random rows, and batches over them: what operations are compared on, whatever runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from stepwell.engine.passes.paging import Look, Paging, Sight
from stepwell.engine.passes.rows import PLAIN, Rows


@dataclass(frozen=True)
class Shape:
    """One layer and a batch: `contexts` counts the tokens before those of each segment, `lengths` the tokens of the segment."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    page: int = 4
    window: int | None = None
    contexts: Sequence[int] = (0, 7, 12)
    lengths: Sequence[int] = (1, 1, 5)


class Scene:
    """Every page of every segment lies somewhere else; unassigned pages hold NaN, and so do rows behind the last."""

    def __init__(self, shape: Shape, seed: int = 0, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.shape, self.seed, self.device, self.dtype = shape, seed, device, dtype
        self.random = torch.Generator().manual_seed(seed)
        counts = [-(-(before + new) // shape.page) for before, new in zip(shape.contexts, shape.lengths, strict=True)]
        ids = Random(seed).sample(range(sum(counts) + 3), sum(counts))
        layers, layer = 3, 1
        arena_PLRE = torch.full((sum(counts) + 3, layers, shape.page, 2 * shape.kv_heads * shape.width), torch.nan)
        looks, slots, start, at = [], [], 0, 0
        for before, new, count in zip(shape.contexts, shape.lengths, counts, strict=True):
            pages = np.array(ids[at : at + count], np.int32)
            for token in range(before + new):
                arena_PLRE[pages[token // shape.page], :, token % shape.page] = self.numbers(layers, arena_PLRE.shape[-1])
            slots += [(pages[token // shape.page], token % shape.page) for token in range(before, before + new)]
            first = 0 if shape.window is None else max(before - shape.window + 1, 0) // shape.page
            looks.append(Look(start=start, stop=start + new, position=before, first=first * shape.page, pages=pages[first:]))
            start, at = start + new, at + count
        self.rows = Rows(arena_PLRE.to(dtype).to(device)[:, layer], PLAIN, dtype)
        singles = next((at for at, new in enumerate(shape.lengths) if new > 1), len(looks))
        page_N, row_N = torch.tensor(np.array(slots, np.int64), device=device).T.contiguous()
        self.paging = Paging(
            looks,
            Sight(page_tokens=shape.page, window=shape.window, first_seen=0, device=device, dtype=dtype),
            page_N=page_N,
            row_N=row_N,
            num_singles=singles,
            together=lambda: [range(singles)] if singles else [],
        )
        self.num_tokens = start

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def made(self, *shape: int) -> torch.Tensor:
        """Random numbers where the pages are, in their format."""
        return self.numbers(*shape).to(self.dtype).to(self.device)

    def clear_unwritten(self) -> None:
        """As a pass does before plain torch reads whole pages."""
        self.rows.stored_PRE.nan_to_num_(nan=0.0)


def random_shape(seed: int, *, widths: Sequence[int], pages: Sequence[int] = (4, 16, 64)) -> Shape:
    draw = Random(seed)
    singles, runs = draw.randrange(4), draw.randrange(3)
    singles += not singles + runs
    lengths = [1] * singles + [draw.randrange(2, 90) for _ in range(runs)]
    group, kv_heads = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
    return Shape(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        width=draw.choice(widths),
        page=draw.choice(pages),
        window=draw.choice([None, 1, 7, 33, 128]),
        contexts=[draw.randrange(300) for _ in lengths],
        lengths=lengths,
    )


def far_apart(rows: Rows, reach: int = 2**33) -> Rows:
    """The same rows, in pages so far apart that only the first lie within 32 bits. The space between them belongs to no page."""
    stored = rows.stored_PRE
    stride = -(-reach // len(stored) // 1024) * 1024
    memory = torch.empty(len(stored) * stride, dtype=stored.dtype, device=stored.device)
    spread = memory.as_strided(stored.shape, (stride, stored.shape[2], 1))
    return Rows(spread.copy_(stored), rows.format, rows.dtype)
