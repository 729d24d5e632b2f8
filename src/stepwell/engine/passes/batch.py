"""One forward pass over several requests: their next tokens back to back, and where their memory lies.

    tokens    | a | b | c | d d d d d d | e e e |       N tokens of S segments
              |- singles -|---- runs ---------|         requests that decode come first, one token each

Singles share one attention call, over padded page tables; runs have one each. Tensors end in their axes: N tokens, S segments,
B singles, P pages, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec, Prefix
from stepwell.base.tasks import PageIds
from stepwell.engine.passes.groups import Groups
from stepwell.engine.passes.numbers import Send, copy, several_on_device
from stepwell.engine.passes.open_groups import OpenGroups
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import Look, Paging, RequestRows, Sight
from stepwell.engine.passes.rows import PLAIN, RowFormat, Rows
from stepwell.engine.passes.spilled import Spilled, spilled_in
from stepwell.jobs.executors import Arriving

PADDING_PAGES = 64  # padding up to this is not worth a second kernel launch

Indices = npt.NDArray[np.int64]


class Batch:
    """Segments as tensors on one device. Singles must come before runs."""

    def __init__(
        self, segments: Sequence[RequestRows], pages: DevicePages, *, device: str | torch.device, every_token: bool = False,
        dtype: torch.dtype = torch.float32, first_seen: int = 0, open_groups: OpenGroups | None = None,
        arriving: Sequence[Arriving] = (), send: Send = copy,
    ) -> None:  # fmt: skip
        """`dtype` is what the model computes in; masks are added to its scores. No token attends to those before `first_seen`.
        `arriving` are loads that bring some of the pages; each layer waits for its own bytes. `send` is `Kernels.send`.
        """
        self._dtype = dtype
        self.send = send
        self._first_seen = first_seen
        self.segments = segments
        self.pages = pages.while_arriving(arriving) if arriving else pages
        self.arriving = arriving
        self.open_groups = open_groups
        self.device = device
        lengths = [len(segment.tokens) for segment in segments]
        assert lengths and min(lengths) > 0, f"a pass needs tokens of every segment: {lengths=}"
        self.num_singles = next((at for at, length in enumerate(lengths) if length > 1), len(lengths))
        assert 1 not in lengths[self.num_singles :], f"singles come first: {lengths=}"
        self.starts = [0, *accumulate(lengths)]  # segment s has rows [starts[s], starts[s + 1])
        singles, runs = segments[: self.num_singles], segments[self.num_singles :]
        tokens = _joined((segment.tokens[0] for segment in singles), (np.asarray(segment.tokens) for segment in runs))
        positions = _joined((each.position for each in singles), (np.arange(each.position, each.end) for each in runs))
        stops = zip(segments, self.starts[1:], strict=True)
        last = [row for segment, stop in stops for row in range(stop - segment.num_logits, stop)]
        rows = np.fromiter(range(self.starts[-1]) if every_token else last, np.int64)  # whose logits are requested
        points = [segment.point_page for segment in segments if segment.point_page is not None]
        fresh = [segment.position == 0 for segment in segments if segment.point_page is not None]
        made = self.numbers(tokens, positions, rows, np.array(points, np.int64), np.array(fresh, np.int64))
        self.tokens_N, self.positions_N, self.wanted = made[:3]
        self.wants_all = len(rows) == self.starts[-1]
        self.points_S = made[3]  # the page of each segment's point state, for models that have one
        self.fresh_S = made[4].bool()  # which segments start at token 0, with an empty state
        self._paging: dict[int | None, Paging] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.pages.spec

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def copy_points(self) -> None:
        """After the pass, and before the next one changes them: copies point pages to those reserved for the tree."""
        for segment in self.segments:
            if segment.point_copy is not None:
                assert segment.point_page is not None, f"a copy of no point page: {segment}"
                self.pages.copy_point(segment.point_page, segment.point_copy)

    def paging(self, window: int | None) -> Paging:
        """Prefix pages if `window` is None, else window pages for layers that attend to the last `window` tokens."""
        if window not in self._paging:
            self._paging[window] = self._page(window)
        return self._paging[window]

    def groups(self, ratio: int, paging: Paging) -> Groups:
        """Groups of one ratio. `paging` is that of the windows in which the same layers attend."""
        return Groups.of(self.segments, self.starts, paging, ratio=ratio, page_tokens=self.spec.page_tokens)

    def paging_of(self, state: str) -> Paging:
        """Prefix pages for a state: ROWS pages for one whose rows may spill, if all rows that the pass reads are on the device.

        Otherwise ROWS pages name only what is written, and what is read is looked up.
        """
        spilling = self.pages.spilling
        return self.paging(None) if spilling is None or state != spilling.state else self.rows_paging

    @cached_property
    def rows_paging(self) -> Paging:
        spilling, whole = self.pages.spilling, self.paging(None)
        assert spilling is not None, "rows of this model do not spill"
        pages, rows = self._slots(self.spec.page_tokens, None)
        looks = whole.looks
        if self.spilled is None:
            looks = [replace(look, pages=spilling.rows_of(look.pages)) for look in looks]
        page_N, row_N = self.numbers(spilling.rows_of(pages.astype(np.int32)), rows)
        return Paging(
            looks, whole.sight, page_N=page_N, row_N=row_N, num_singles=self.num_singles,
            together=self._together([(look.first, look.pages) for look in looks]),
        )  # fmt: skip

    def rows_of(self, state: str) -> Callable[[PageIds], PageIds]:
        """The pages that hold the rows of a state, for prefix pages that the pass writes to."""
        spilling = self.pages.spilling
        return (lambda pages: pages) if spilling is None or state != spilling.state else spilling.rows_of

    def rows(self, state: str, layer: int, kept: RowFormat = PLAIN) -> Rows:
        """One layer of a state, read and written in the model's data type."""
        return self.pages.rows(state, layer, kept, self._dtype, spilled=self.spilled is not None)

    @cached_property
    def spilled(self) -> Spilled | None:
        """How it reads rows that are on the host alone; None if it reads none."""
        spilling = self.pages.spilling
        return None if spilling is None else spilled_in(spilling, self.segments, lambda: self.paging(None))

    def prepare(self) -> None:
        """Prepares memory: all rows that may be read hold numbers, and open groups of segments that resume are in their slots.
        Sends the device the places of rows that may be on the host alone.

        Attention reads whole pages, and masks what is not written: pages that this pass begins and does not fill are cleared. If
        groups are longer than a page, all pages that it begins are, for most of them never get an entry.
        """
        spec, each_page = self.spec, _longest_group(self.spec) > self.spec.page_tokens
        if spec.parts(Kind.PREFIX):
            prefix = [page for s in self.segments for page in _begun(s.prefix_pages, s, spec.page_tokens, 0, each_page)]
            self.pages.clear(Kind.PREFIX, prefix, self.send)
        if self.pages.spilling is not None:
            self.pages.spilling.begin()
        if spec.parts(Kind.WINDOW):
            size = spec.window_page_tokens
            windows = [page for s in self.segments for page in _begun(s.window_pages, s, size, s.first_window, False)]
            self.pages.clear(Kind.WINDOW, windows, self.send)
        if self.open_groups is not None:
            for part in spec.parts(Kind.POINT) if self.open_groups.needed else ():
                self.pages.wait_for_state(part.state)  # these are read and written in addition to the pages of this pass
            for segment, slot, page in self._with_open_groups():
                if segment.resumes:
                    self.open_groups.restore(slot, page=page, boundary=segment.position)

    def finish(self) -> None:
        """After the pass: copies the open groups of segments that end at a boundary to their point pages, for a checkpoint."""
        if self.open_groups is not None:
            for segment, slot, page in self._with_open_groups():
                if self.spec.is_legal(segment.end):
                    self.open_groups.keep(slot, page=page, boundary=segment.end)

    # ---- inside -----------------------------------------------------------------------------------

    def _with_open_groups(self) -> list[tuple[RequestRows, int, int]]:
        """Segments that may have open groups, with their slots and their point pages."""
        return [(s, s.slot, s.point_page) for s in self.segments if s.slot is not None and s.point_page is not None]

    def _page(self, window: int | None) -> Paging:
        size = self.spec.page_tokens if window is None else self.spec.window_page_tokens
        spans = [_span(segment, window, size) for segment in self.segments]
        looks = [
            Look(start=start, stop=stop, position=segment.position, first=first, pages=pages, picks_from=segment.picks_from)
            for segment, (first, pages), start, stop in zip(self.segments, spans, self.starts, self.starts[1:], strict=False)
        ]
        page_N, row_N = self.numbers(*self._slots(size, window))
        sight = Sight(
            page_tokens=size, window=window, first_seen=self._first_seen, device=self.device, dtype=self._dtype, send=self.send
        )
        return Paging(
            looks,
            sight,
            page_N=page_N,
            row_N=row_N,
            num_singles=self.num_singles,
            together=self._together(spans),
        )

    def _slots(self, size: int, window: int | None) -> tuple[Indices, Indices]:
        """Page and row of every token."""
        pages, rows = [], []
        for segment in self.segments[: self.num_singles]:
            index, row = divmod(segment.position, size)
            held = segment.prefix_pages if window is None else segment.window_pages
            pages.append(held[index if window is None else index - segment.first_window])
            rows.append(row)
        slots = [_slots_of_run(segment, size, window) for segment in self.segments[self.num_singles :]]
        return _joined(pages, (page for page, _ in slots)), _joined(rows, (row for _, row in slots))

    def _together(self, spans: Sequence[tuple[int, PageIds]]) -> Callable[[], Iterator[range]]:
        """Belongs to a paging. It must not hold the batch: a reference cycle would keep all masks and tables alive until
        the garbage collector runs, which takes minutes under load.
        """
        return partial(_together, self.segments[: self.num_singles], spans, self.spec)

    def _tensor(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return self.numbers(values)[0]

    def numbers(self, *values: npt.NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """Numbers on the device, sent together."""
        return several_on_device(values, self.device, self.send)


def _span(segment: RequestRows, window: int | None, size: int) -> tuple[int, PageIds]:
    """The first token of the pages that a segment attends to, and those pages."""
    stop = -(-segment.end // size)
    if window is None:
        return 0, segment.prefix_pages[:stop]
    first = max(segment.position - window + 1, 0) // size
    assert first >= segment.first_window, f"window pages from {first} on are needed, from {segment.first_window} on are held"
    return first * size, segment.window_pages[first - segment.first_window : stop - segment.first_window]


def _together(singles: Sequence[RequestRows], spans: Sequence[tuple[int, PageIds]], spec: ModelSpec) -> Iterator[range]:
    """Singles that share an attention call. Layers with a window and groups need both divided alike: as groups are."""
    if _longest_group(spec) > 1:
        spans = [_span(segment, None, spec.page_tokens) for segment in singles]
    return _alike(spans[: len(singles)], [segment.position >= segment.picks_from for segment in singles])


def _longest_group(spec: ModelSpec) -> int:
    """The most tokens that one row of a prefix page stands for."""
    return max((s.shape.ratio for s in spec.states if isinstance(s.shape, Prefix)), default=1)


def _alike(spans: Sequence[tuple[int, PageIds]], picks: Sequence[bool]) -> Iterator[range]:
    """Neighbours of similar length: padding them to one length costs at most as much again, or a few pages. Those for which a
    selector picks are separate from those that attend to everything.
    """
    if not spans:
        return
    start, longest, total = 0, len(spans[0][1]), len(spans[0][1])
    for at in range(1, len(spans)):
        length = len(spans[at][1])
        longest, total = max(longest, length), total + length
        if picks[at] != picks[start] or (at + 1 - start) * longest > 2 * total + PADDING_PAGES:
            yield range(start, at)
            start, longest, total = at, length, length
    yield range(start, len(spans))


def _begun(pages: PageIds, segment: RequestRows, size: int, first: int, each: bool) -> list[int]:
    """The pages that a segment begins and does not fill; with `each` all that it begins. `pages` begin at index `first`."""
    if len(segment.tokens) == 1 and segment.position % size:
        return []  # most steps of most requests
    begun = range(-(-segment.position // size), -(-segment.end // size))
    return [int(pages[at - first]) for at in begun if (each or at >= segment.end // size) and at - first < len(pages)]


def _joined(singles: Iterable[int], runs: Iterable[npt.NDArray[np.integer]]) -> Indices:
    """One number for each single, and several for each run, behind one another."""
    return np.concatenate([np.array([*singles], np.int64), *runs])


def _slots_of_run(segment: RequestRows, size: int, window: int | None) -> tuple[PageIds, Indices]:
    """Page and row of each of a segment's tokens."""
    index, row = np.divmod(np.arange(segment.position, segment.end), size)
    return (segment.prefix_pages[index] if window is None else segment.window_pages[index - segment.first_window]), row
