"""Long contexts for an engine without computing them: selections of a trace, and pages of random rows.

    selections   `TracedSelect` stands where `Kernels.select` does. The index is scored and its best are taken as always, so that
                 a step costs what it costs; then what they are is replaced, and their scores too where these are handed on. A
                 model of random weights picks without locality
    step         of a trace: by the position of each token, which is on the device. So a recorded step moves on when it is played.
                 At its end a trace is followed backwards
    rows         of random numbers, valid in their format, written into pages of leases, and committed through the cache's own
                 calls. Rows of all contexts are alike, but no two contexts share a page

Measures nothing. Axes: S traces, N steps, K positions selected, T positions, B requests, P pages, L layers, R rows of a page,
E bytes of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.driving import settle
from sparse.trace import Latent, make_trace
from stepwell.engine import Engine
from stepwell.engine.ops.selection import Picked, Select, Selection
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import Paging, Singles
from stepwell.engine.passes.rows import Rows, latent_rows

TRACES = 2  # which requests have by turns: a trace takes seconds to make, and their misses are alike
DRAWN_PAGES = 256  # of random rows, written repeatedly: enough that scores of an index seldom tie


class Traces(NamedTuple):
    position_SNK: torch.Tensor
    score_SNT: torch.Tensor


def traces(latent: Latent, *, context: int, steps: int, count: int) -> Traces:
    """Traces of requests that begin to answer after `context` tokens. Scores have 16 bits, which is precise enough."""
    made = [make_trace(latent, context=context, steps=steps, count=count, seed=seed, scores=True) for seed in range(TRACES)]
    position_SNK = torch.from_numpy(np.stack([trace.position_NK for trace in made]))
    return Traces(position_SNK, torch.stack([torch.from_numpy(trace.score_NT).half() for trace in made]))


class TracedSelect:
    """Picks by an index, and says that it picked what a trace did. Runs of several tokens keep what was picked."""

    def __init__(self, behind: Select, *, steps: int, count: int, longest: int, device: str) -> None:
        """For contexts of up to `longest` tokens, with those that are answered."""
        self._behind = behind
        # These stay where they are: recordings read them.
        self._position_SNK = torch.zeros(TRACES, steps, count, dtype=torch.int32, device=device)
        self._score_SNT = torch.zeros(TRACES, steps, longest, dtype=torch.float16, device=device)
        self._context_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def follow(self, followed: Traces, context: int) -> None:
        """From the next pass on: step 0 is that of the token at position `context`."""
        self._position_SNK.copy_(followed.position_SNK)
        length = followed.score_SNT.shape[2]
        self._score_SNT[..., :length], self._score_SNT[..., length:] = followed.score_SNT, -torch.inf
        self._context_1.fill_(context)

    def __call__(
        self, query_NHD: torch.Tensor, weight_NH: torch.Tensor, rows: Rows, paging: Paging, *, count: int, scored: int = 0
    ) -> Selection:
        found = self._behind(query_NHD, weight_NH, rows, paging, count=count, scored=scored)
        return tuple(
            self._at(part, scored) if picked is not None and isinstance(part, Singles) else picked
            for part, picked in zip(paging.parts, found, strict=True)
        )

    def _at(self, part: Singles, scored: int) -> Picked:
        last = self._position_SNK.shape[1] - 1
        step_B = last - ((part.position_B - self._context_1) % (2 * last) - last).abs()
        trace_B = torch.arange(len(step_B), device=step_B.device) % TRACES
        seen = part.table_BP.shape[1] * part.sight.page_tokens  # an index gives no scores beyond them
        score_BT = self._score_SNT[trace_B, step_B, :seen] if scored else None
        return Picked(position_XK=self._position_SNK[trace_B, step_B], score_YT=score_BT)


class Contexts:
    """Puts prompts into an engine's cache, all of whose tokens count as computed. No request may be running."""

    def __init__(self, engine: Engine, config: dict[str, int]) -> None:
        """`config` is the model's."""
        self._engine, self._pages = engine, engine._runner._pages
        widths = {"kv": (config["kv_lora_rank"], config["qk_rope_head_dim"]), "index": (config["index_head_dim"], 0)}
        self._drawn = {name: _draw(self._pages, name, *width) for name, width in widths.items()}

    def put(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prompts of whole pages. They end on the host, and stay on the device until newer ones need the memory."""
        cache, spilling = self._engine.cache, self._pages.spilling
        for prompt in prompts:
            with cache.acquire(cache.lookup(prompt)) as lease:
                cache.grow(lease, len(prompt))
                ids = lease.prefix_pages
                self._write("index", ids)
                self._write("kv", ids if spilling is None else spilling.rows_of(ids))
                if self._engine.on_cuda:
                    torch.cuda.synchronize()  # before anybody copies them
                cache.commit(lease, len(prompt))
            settle(self._engine)

    def _write(self, name: str, ids: np.ndarray) -> None:
        there_PLRE, drawn_PLRE = self._pages.bytes_PLRB(name), self._drawn[name]
        for start in range(0, len(ids), len(drawn_PLRE)):
            mine = torch.from_numpy(ids[start : start + len(drawn_PLRE)]).long().to(there_PLRE.device)
            there_PLRE[mine] = drawn_PLRE[: len(mine)]


def _draw(pages: DevicePages, name: str, width: int, exact: int) -> torch.Tensor:
    there_PLRE = pages.bytes_PLRB(name)
    shape = (min(DRAWN_PAGES, len(there_PLRE)), *there_PLRE.shape[1:])
    generator = torch.Generator(there_PLRE.device).manual_seed(1)
    numbers = torch.randn(shape[0] * shape[1] * shape[2], width + exact, generator=generator, device=there_PLRE.device)
    return latent_rows(pages.spec.state(name).dtype, width, exact).encode(numbers).view(shape)
