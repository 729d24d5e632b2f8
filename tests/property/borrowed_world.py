"""A world without a device tier: the engine owns its memory, names its own pages, and copies from and into the host.

A request updates its point state in place, as models do: a copy that still reads it while the request goes on would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from oracle import needs_checkpoint
from toy_models import Regime, Setup
from watched import packed
from world import Held, World

from stepwell import EnginePages, Kind, Match, ModelSpec, Namespace, Tier

ENGINE_PAGES = 6000  # of each kind; enough for the longest life


class EngineMemory:
    """The engine's own bytes: a table of pages for each kind."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._rows = {kind: np.zeros((ENGINE_PAGES, spec.object_bytes(kind)), np.uint8) for kind in Kind}

    def rows(self, kind: Kind) -> npt.NDArray[np.uint8]:
        return self._rows[kind]


@dataclass
class Desk:
    """What the engine has of one request in its own memory."""

    position: int = 0
    prefix: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    first_window: int = 0
    points: list[int] = field(default_factory=list)


class BorrowedWorld(World):
    """A cache with a host tier alone."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._next = dict.fromkeys(Kind, 0)
        self._desks: dict[int, Desk] = {}

    def _memories(self, layouts: dict) -> dict:
        return super()._memories(layouts) | {Tier.ENGINE: EngineMemory(self.spec)}

    def _seen_by_engine(self, memories: dict) -> dict:
        return memories | {Tier.DEVICE: memories[Tier.ENGINE]}

    @property
    def exact(self) -> bool:
        return self.regime.exact and not self.ledger.in_flight  # a page counts once its copy has arrived

    def _take(self, kind: Kind, count: int) -> list[int]:
        self._next[kind] += count
        assert self._next[kind] <= ENGINE_PAGES
        return list(range(self._next[kind] - count, self._next[kind]))

    # ---- a request's life -------------------------------------------------------------------------

    def acquire(self, tokens: list[int], namespace: Namespace, *, match: Match | None = None, **asked: object) -> Held | None:  # type: ignore[override]
        held = super().acquire(tokens, namespace, match=match, **asked)  # type: ignore[arg-type]
        if held is None:
            return None
        desk = self._desks[held.lease.id] = Desk(position=held.lease.resume)
        if held.lease.resume:
            self._load(held, desk)
        return held

    def _load(self, held: Held, desk: Desk) -> None:
        here = desk.position // self.spec.window_page_tokens
        span = self.spec.window_span(desk.position) if needs_checkpoint(self.spec, desk.position) else range(here, here)
        desk.prefix = self._take(Kind.PREFIX, desk.position // self.spec.page_tokens)
        desk.windows, desk.first_window = self._take(Kind.WINDOW, len(span)), span.start
        desk.points = self._take(Kind.POINT, 1 if self.spec.parts(Kind.POINT) else 0)
        self.cache.load(held.lease, _named(desk.prefix, desk.windows, desk.points))
        assert not held.lease.ready, f"{held.lease} is ready before its load ended"

    def _compute(self, held: Held, upto: int) -> bool:
        desk = self._desks[held.lease.id]
        desk.prefix += self._take(Kind.PREFIX, max(-(-upto // self.spec.page_tokens) - len(desk.prefix), 0))
        if self.spec.window_tokens:
            count = -(-upto // self.spec.window_page_tokens) - desk.first_window - len(desk.windows)
            desk.windows += self._take(Kind.WINDOW, max(count, 0))
        if self.spec.parts(Kind.POINT) and not desk.points:
            desk.points = self._take(Kind.POINT, 1)
        self.engine.compute(self._view(held, desk), upto)
        self.ledger.computed(
            Tier.ENGINE, held.space, packed(held.tokens[:upto]), desk.position,
            prefix=desk.prefix, windows=desk.windows, first_window=desk.first_window, points=desk.points,
        )  # fmt: skip
        desk.position = upto
        return True

    def commit(self, held: Held, upto: int, *, last: bool = False) -> None:
        lease, desk = held.lease, self._desks[held.lease.id]
        asked = self.oracle.asked(lease.stops, lease.prompt_tokens, upto, last=last)
        span = self.spec.window_span(upto) if asked else range(0)
        windows = [desk.windows[at - desk.first_window] for at in span]
        if not held.cleared:
            self.ledger.offered(Tier.ENGINE, desk.prefix[: upto // self.spec.page_tokens])
        skipped = self.cache.counters["checkpoint_skipped_no_room"]
        saved = self.cache.commit(lease, upto, source=_named(desk.prefix, windows, desk.points), last=last)
        left = saved and self.cache.counters["checkpoint_skipped_no_room"] == skipped
        assert (saved and left) or held.cleared or self.regime is not Regime.CALM, f"{lease} saved less in a calm run"
        held.finished = held.finished or last
        self.note_commit(held, upto, checkpoint=asked and left)

    def check_lease(self, held: Held) -> None:
        desk = self._desks[held.lease.id]
        self._check_pages(Tier.ENGINE, held, desk.position, desk.prefix, desk.points)
        self.engine.check(self._view(held, desk))

    def _view(self, held: Held, desk: Desk) -> SimpleNamespace:
        """The engine's memory of a request, in the terms the model of digests reads."""
        return SimpleNamespace(
            packed=packed(held.tokens),
            namespace=held.namespace,
            position=desk.position,
            prefix_pages=desk.prefix,
            window_pages=desk.windows,
            first_window=desk.first_window,
            point_pages=desk.points,
        )


def _named(prefix: list[int], windows: list[int], points: list[int]) -> EnginePages:
    return EnginePages(prefix=np.array(prefix, np.int32), windows=np.array(windows, np.int32), points=np.array(points, np.int32))
