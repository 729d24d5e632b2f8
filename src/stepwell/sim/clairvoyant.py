"""What a policy that knows the whole trace beforehand could have done with one tier of the same bytes.

A strong policy, not a bound: it gives up, greedily, what is worth least, and another choice may turn out better later. With the
future known and bytes of two kinds (pages, checkpoints) that depend on each other, the best choice is not known to anybody.

    worth of a checkpoint    tokens down from the checkpoint above it / bytes it frees / seconds until somebody comes by
    bytes it frees           its own, and those of pages that nothing else below or above needs
    without checkpoints      pages, from the bottom of their paths, by seconds until somebody comes by

What nobody comes by again goes first. A request computes into the tier, as in the cache itself: its path needs room for as long,
whether any of it stays or not. Windows that neighbouring checkpoints could share are counted for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.sim.clairvoyant_choice import Choice
from stepwell.sim.clairvoyant_tree import NOWHERE, Floats, Ints, PromptTree, next_passes_s, tree_of
from stepwell.sim.trace import Trace


class Leaving(Enum):
    """Where checkpoints are left."""

    SEEN = "seen"  # at each prompt's end, and where a request leaves pages that are cached: what anybody could do
    WANTED = "wanted"  # wherever a later request leaves all that was ever seen, and nowhere else


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What came of it, over all requests."""

    prompt_tokens: int
    resumed_tokens: int
    checkpoints_made: int

    @property
    def hit_rate(self) -> float:
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def foresee(
    trace: Trace,
    spec: ModelSpec,
    *,
    budget_bytes: int,
    leaving: Leaving = Leaving.SEEN,
    on_request: Callable[[], None] | None = None,
) -> Foreseen:
    """Serves a whole trace from an empty tier. Raises TraceError for a trace that cannot be read, ConfigError for no bytes."""
    if budget_bytes < 1:
        raise ConfigError(f"budget_bytes must be positive, got {budget_bytes}")
    tier = _Tier(tree_of(trace, page_tokens=step_tokens(spec)), spec, budget_bytes, leaving)
    return tier.serve_all(on_request)


def step_tokens(spec: ModelSpec) -> int:
    """Tokens from one boundary to the next. Where some boundaries need no checkpoint only those are looked at."""
    return spec.free_step or spec.boundary_step


def working_set_bytes(tree: PromptTree, spec: ModelSpec) -> int:
    """Bytes of all distinct pages of a trace."""
    return tree.num_pages * _step_bytes(spec)


def _step_bytes(spec: ModelSpec) -> int:
    return step_tokens(spec) // spec.page_tokens * spec.object_bytes(Kind.PREFIX)


class _Tier:
    """What is cached of a tree. An edge is held from its top; below one that is not held whole nothing is."""

    def __init__(self, tree: PromptTree, spec: ModelSpec, budget_bytes: int, leaving: Leaving) -> None:
        self._tree = tree
        self._leaving = leaving
        self._budget_bytes = budget_bytes
        self._page_bytes = _step_bytes(spec)
        self._needs_checkpoints = spec.free_step is None
        self._used_bytes = 0
        self._made = 0
        places = len(tree.above_P)
        self._above: list[int] = tree.above_P.tolist()
        self._depth: list[int] = tree.depth_P.tolist()
        self._pages: list[int] = tree.pages_P.tolist()
        self._checkpoint_bytes = [spec.checkpoint_bytes(depth * tree.page_tokens) for depth in self._depth]
        self._below: list[set[int]] = [set() for _ in range(places)]  # places whose edges are held, at least in part
        self._held_P = np.zeros(places, np.int64)  # pages of each edge
        self._checkpoint_P = np.zeros(places, bool)
        self._choice = Choice(places)
        self._path: Ints = np.zeros(0, np.int64)  # of the request that is served; what it holds stays
        self._on_path: set[int] = set()

    def serve_all(self, on_request: Callable[[], None] | None) -> Foreseen:
        tree, resumed = self._tree, 0
        paths = tree.paths()
        for number, (path, next_s, at_s) in enumerate(zip(paths, next_passes_s(tree, paths), tree.at_s_R.tolist(), strict=True)):
            if len(path):
                resumed += self._serve(number, path, next_s, at_s)
            if on_request is not None:
                on_request()
        self.audit()
        return Foreseen(
            prompt_tokens=int(tree.prompt_tokens_R.sum()),
            resumed_tokens=resumed * tree.page_tokens,
            checkpoints_made=self._made,
        )

    def audit(self) -> None:
        """Asserts that the bytes add up, within the budget."""
        held, checkpoints = int(self._held_P.sum()), np.flatnonzero(self._checkpoint_P).tolist()
        used = held * self._page_bytes + sum(self._checkpoint_bytes[place] for place in checkpoints)
        assert used == self._used_bytes <= self._budget_bytes, f"{used=} {self._used_bytes=} {self._budget_bytes=}"

    def _serve(self, number: int, path: Ints, next_s: Floats, at_s: float) -> int:
        """One request; returns how many pages it resumed."""
        self._path, self._on_path = path, set(path.tolist())
        self._choice.pass_by(path, next_s)
        whole = self._held_P[path] == self._tree.pages_P[path]
        known = len(path) if whole.all() else int(whole.argmin())
        resumed = self._resumed(path, known)
        if self._needs_checkpoints:
            self._leave_checkpoints(number, at_s, known, resumed)
        else:
            self._hold_pages(at_s, known)
        self._path, self._on_path = path[:0], set()
        if known:
            self._free_unneeded(int(path[known - 1]))
        return resumed

    def _resumed(self, path: Ints, known: int) -> int:
        """Pages down to where the request resumes; `known` places of its path are held whole."""
        if not self._needs_checkpoints:
            part = int(self._held_P[path[known]]) if known < len(path) else 0
            return part + (self._depth[path[known - 1]] if known else 0)
        found = np.flatnonzero(self._checkpoint_P[path[:known]])
        return self._depth[path[found[-1]]] if len(found) else 0

    # ---- what a request leaves --------------------------------------------------------------------

    def _leave_checkpoints(self, number: int, at_s: float, known: int, resumed: int) -> None:
        """At its stops, as many as there can be room for, with the pages down to the last of them; the others only pass."""
        stops, path = self._stops(number, known, resumed), self._path.tolist()
        kept = sum(self._checkpoint_bytes[place] for place in path[:known] if self._checkpoint_P[place])
        kept += self._page_bytes * (self._depth[path[known - 1]] if known else 0)
        room = self._budget_bytes - kept
        while stops and self._stop_bytes(stops, known) > room:
            stops.pop()
        computing = sum(self._pages[place] for place in path[known:]) * self._page_bytes
        computing += sum(self._checkpoint_bytes[path[at]] for at in stops)
        if not self._make_room(min(computing, room), at_s) or not stops:
            return
        self._used_bytes += self._stop_bytes(stops, known)
        self._made += len(stops)
        for place in path[known : stops[-1] + 1]:
            self._held_P[place] = self._pages[place]
            if self._above[place] != NOWHERE:
                self._below[self._above[place]].add(place)
        self._checkpoint_P[self._path[stops]] = True
        changed = {path[at] for at in stops} | ({path[known - 1]} if known else set())
        for place in {found for each in changed for found in (each, *self._next_below(each)) if self._checkpoint_P[found]}:
            self._weigh(place)

    def _stops(self, number: int, known: int, resumed: int) -> list[int]:
        """Where on the path checkpoints are to be left: only below where it resumes, since the rest is not computed."""
        path = self._path
        if self._leaving is Leaving.WANTED:
            stops = np.flatnonzero(self._tree.last_wanted_P[path] > number).tolist()
        else:
            stops = [known - 1, len(path) - 1] if 0 < known < len(path) else [len(path) - 1]
        return [at for at in stops if self._depth[path[at]] > resumed]

    def _stop_bytes(self, stops: list[int], known: int) -> int:
        """Bytes of checkpoints there, and of the pages down to them that are not held."""
        path: list[int] = self._path[: max(stops[-1] + 1, known)].tolist()
        pages = self._depth[path[-1]] - (self._depth[path[known - 1]] if known else 0)
        return pages * self._page_bytes + sum(self._checkpoint_bytes[path[at]] for at in stops)

    def _hold_pages(self, at_s: float, known: int) -> None:
        """The path's pages, as far down as there can be room for."""
        path = self._path.tolist()
        room = self._budget_bytes // self._page_bytes
        for place in path[: known + 1]:
            room -= int(self._held_P[place])
        wanted = [self._pages[place] - int(self._held_P[place]) for place in path[known:]]
        added = min(sum(wanted), room)
        if added and self._make_room(added * self._page_bytes, at_s):
            self._used_bytes += added * self._page_bytes
            for place, pages in zip(path[known:], wanted, strict=True):
                taken = min(pages, added)
                added -= taken
                if taken and self._above[place] != NOWHERE:
                    self._below[self._above[place]].add(place)
                self._held_P[place] += taken
        for place in path[max(known - 1, 0) :]:
            self._weigh(place)

    # ---- what goes --------------------------------------------------------------------------------

    def _make_room(self, size_bytes: int, at_s: float) -> bool:
        """Gives up what is worth least until so many bytes are free; False when there is nothing more to give up."""
        while (excess := self._used_bytes + size_bytes - self._budget_bytes) > 0:
            place = self._choice.first(at_s, sparing=self._path)
            if place == NOWHERE:
                return False
            if self._needs_checkpoints:
                self._drop_checkpoint(place)
            else:
                self._trim(place, -(-excess // self._page_bytes))
        return True

    def _trim(self, place: int, pages: int) -> None:
        """Frees up to so many pages from the bottom of an edge."""
        freed = min(pages, int(self._held_P[place]))
        self._held_P[place] -= freed
        self._used_bytes -= freed * self._page_bytes
        if not self._held_P[place]:
            self._detach(place)
            if self._above[place] != NOWHERE:
                self._weigh(self._above[place])

    def _drop_checkpoint(self, place: int) -> None:
        self._checkpoint_P[place] = False
        self._choice.withdraw(place)
        self._used_bytes -= self._checkpoint_bytes[place]
        end = self._free_unneeded(place)
        # What is left below the end may keep more pages alive alone, or save more, than before.
        if end != NOWHERE:
            if self._checkpoint_P[end]:
                self._weigh(end)
            elif end == place or len(self._below[end]) == 1:
                for found in self._next_below(end):
                    self._weigh(found)

    def _free_unneeded(self, place: int) -> int:
        """Frees the edges that lead to no checkpoint any more, from `place` up; returns the first place that stays."""
        if not self._needs_checkpoints:
            return place
        while place != NOWHERE and not (self._below[place] or self._checkpoint_P[place] or place in self._on_path):
            self._used_bytes -= int(self._held_P[place]) * self._page_bytes
            self._held_P[place] = 0
            self._detach(place)
            place = self._above[place]
        return place

    def _detach(self, place: int) -> None:
        self._choice.withdraw(place)
        if self._above[place] != NOWHERE:
            self._below[self._above[place]].discard(place)

    # ---- what it is worth -------------------------------------------------------------------------

    def _weigh(self, place: int) -> None:
        """Tokens that would be computed again per byte freed, if a request came by once `place` was given up."""
        tokens = self._tree.page_tokens
        if not self._needs_checkpoints:
            if self._held_P[place] and not self._below[place]:
                self._choice.offer(place, tokens / self._page_bytes)
            else:
                self._choice.withdraw(place)
            return
        pages, above = 0, self._above[place]
        if not self._below[place]:
            pages = self._pages[place]
            while above != NOWHERE and not self._checkpoint_P[above] and len(self._below[above]) == 1:
                pages += self._pages[above]
                above = self._above[above]
        while above != NOWHERE and not self._checkpoint_P[above]:
            above = self._above[above]
        saved = self._depth[place] - (self._depth[above] if above != NOWHERE else 0)
        self._choice.offer(place, saved * tokens / (self._checkpoint_bytes[place] + pages * self._page_bytes))

    def _next_below(self, place: int) -> Iterator[int]:
        """The checkpoints below `place` with none in between."""
        waiting = list(self._below[place])
        while waiting:
            found = waiting.pop()
            if self._checkpoint_P[found]:
                yield found
            else:
                waiting.extend(self._below[found])
