"""Rows that may be on the host alone: the engine's device memory for them in addition to its pages, and the begin of each pass.

Decides neither which pages are on the host nor which rows are read. `spilled.py` has the work of one pass. Axes as in
`sparse/resolve.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.spill import HEADER, SLOT, Spill
from stepwell.base.tasks import PageIds
from stepwell.base.units import format_bytes
from stepwell.engine.passes.numbers import Send, copy
from stepwell.engine.passes.rows import LayerPlaces, part_PLRE, typed_PLRE
from stepwell.engine.passes.stages import Stages
from stepwell.memory.row_pages import ABSENT, RowPages
from stepwell.sparse.counts import Found
from stepwell.sparse.places import HOST, ROWS, Places, Read
from stepwell.sparse.resolve import Fetch, Plan, Resolve, Wanted

SHORT_RUN = 8  # tokens of a run that resolves what it selects; longer ones read nearly everything
PLAN_BYTES = 16  # of an entry
COUNTED = 32  # passes between two updates of the figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Maximum sizes: requests of a pass, hot pages of each, rows that a query selects, tokens of the longest request."""

    requests: int
    hot_pages: int
    selected: int
    context: int

    @classmethod
    def of(cls, spec: ModelSpec, config: CacheConfig, *, requests: int, selected: int, max_context: int) -> Sizes:
        """A request has each page's rows on the host or on the device, so it is no longer than both together."""
        assert config.host_bytes is not None and config.device_bytes is not None, "rows spill from a device to a host"
        pages = config.host_bytes // spec.object_bytes(Kind.PREFIX) + config.device_bytes // spec.device_bytes(Kind.ROWS)
        return cls(
            requests=requests,
            hot_pages=-(-config.hot_rows // spec.page_tokens),
            selected=selected,
            context=min(max_context, pages * spec.page_tokens),
        )

    def less(self, config: CacheConfig, spec: ModelSpec) -> CacheConfig:
        """The config with a device tier that leaves memory for all this. Raises ConfigError if nothing is left."""
        device_bytes, extra_bytes = config.device_bytes or 0, self.extra_bytes(spec)
        if device_bytes <= extra_bytes:
            raise ConfigError(
                f"device_memory is {format_bytes(device_bytes)}, and rows that spill need {format_bytes(extra_bytes)} besides "
                f"pages, of that {format_bytes(PLAN_BYTES * self.entries)} to plan for {self.requests} requests that select "
                f"{self.selected:,} rows each: raise it, or lower hot_rows, max_running or, if it is set, sparse_budget"
            )
        return replace(config, device_bytes=device_bytes - extra_bytes)

    def extra_bytes(self, spec: ModelSpec) -> int:
        """The device memory for all this, in addition to the pages."""
        spill = _spill_of(spec)
        slots = self.requests * self.hot_pages * spec.page_tokens
        tables = Places.table_bytes(slots=slots, groups=spill.num_groups)
        pages = -(-self.context // spec.page_tokens)
        scratch = pages * spec.page_tokens * spec.state(spill.states[0]).row_bytes
        return tables + PLAN_BYTES * self.entries + scratch

    @property
    def entries(self) -> int:
        """References of the largest pass."""
        return self.requests * SHORT_RUN * self.selected


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillReport:
    """Sums since the start, over groups of layers that share a selection; and the current places of pages."""

    steps: int  # passes that looked for rows on the host. On CUDA the following sums may be some passes behind
    resident: int  # references to rows of pages on the device
    hits: int  # to rows that were among the hot ones
    misses: int  # rows that were not,
    read_through: int  # those without a slot, read from the host in place
    fetched_bytes: int  # copied for misses, over all layers
    staged_bytes: int  # copied for prompts that are computed over pages whose rows are on the host
    host_pages: int  # prefix pages on the device whose rows are on the host alone
    hot_pages: int
    hot_rows: int  # of a layer, that one request may have
    beside_bytes: int  # device memory for all this, in addition to pages


class Spilling:
    """The spilled rows of one engine. Begins each pass, and keeps what all passes share."""

    def __init__(
        self, spec: ModelSpec, rows: Mapping[Kind, torch.Tensor], host: torch.Tensor, row_pages: RowPages, sizes: Sizes, *,
        resolve: Resolve, fetch: Fetch, read: Read = Places.read, send: Send = copy,
        asks_host: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """`rows` are the pages of the device, by kind, and `host` all prefix pages of the host, as `[page, byte]`. `asks_host`
        says whether these operations, as they run now, wait for the device.
        """
        spill = _spill_of(spec)
        self.state, self.row_pages, self.sizes = spill.states[0], row_pages, sizes
        self.group_of = spill.group_of[self.state]
        self._resolve, self._fetch, self._read = resolve, fetch, read
        self._asks_host = asks_host
        own = {part.state: part for part in spec.device_parts(Kind.PREFIX)}
        mine, whole = (
            next(part for part in of.device_parts(kind) if part.state == self.state)
            for of, kind in ((spec, Kind.ROWS), (replace(spec, spill=None), Kind.PREFIX))
        )
        dtype = spec.state(self.state).dtype
        self.places = Places(
            rows_PLRE=typed_PLRE(rows[Kind.ROWS], mine, dtype),
            host_PLRE=typed_PLRE(host, whole, dtype),
            slot_PGR=part_PLRE(rows[Kind.PREFIX], own[SLOT], torch.int32)[..., 0],
            header_P3=part_PLRE(rows[Kind.PREFIX], own[HEADER], torch.int32)[:, 0, 0],
            numbers=sizes.requests * sizes.hot_pages,
            requests=sizes.requests,
        )
        self._plan = Plan(sizes.entries, self.places.device)
        self.stages = Stages(self.places, -(-sizes.context // spec.page_tokens), fetch=fetch, send=send)
        stored = self.places.rows_PLRE
        self._row_bytes = [stored.shape[3] * stored.element_size() * self.group_of.count(g) for g in range(spill.num_groups)]
        self._hot_rows, self._beside_bytes = sizes.hot_pages * spec.page_tokens, sizes.extra_bytes(spec)
        self.steps = 0  # passes that resolved, and ended
        self._found, self._passes = Found(), 0

    def of_layer(self, state: str, layer: int) -> LayerPlaces | None:
        if state != self.state:
            return None
        return LayerPlaces(self.places, layer, self.group_of[layer], self._read)

    @property
    def asks_host(self) -> bool:
        """Whether a pass that resolves waits for the device, so that it cannot be captured."""
        return self._asks_host()

    def rows_of(self, pages: PageIds) -> PageIds:
        """The ROWS pages of prefix pages that have some: those that are written to, and all if no rows have been spilled."""
        rows = self.row_pages.rows[pages]
        assert (rows != ABSENT).all(), f"prefix pages {pages[rows == ABSENT][:8]} must have rows here, and have none"
        return rows

    def begin(self) -> None:
        """Before every pass, on its stream: sends the changed places of pages to the device."""
        self.row_pages.drain(self.places.apply)
        self._passes += 1
        if self._passes % COUNTED == 0:
            self.places.counts.start_reading()

    @property
    def scored(self) -> bool:
        """Whether `resolve` needs the scores by which rows were selected."""
        return self.sizes.hot_pages > 0

    def resolve(self, group: int, wanted: Wanted) -> None:
        self._resolve(self.places, group, wanted, self._plan)

    def fetch(self, layer: int) -> None:
        """One layer of the plan."""
        self._fetch(self.places, layer, self._plan)

    @contextmanager
    def pretend_on_host(self, page: int) -> Iterator[None]:
        """Marks a page's rows as spilled, for a pass whose result is not used, and undoes that after it. Counts nothing."""
        header_3, tally_GBC = self.places.header_P3[page], self.places.counts.tally_GBC
        before_3, counted_GBC = header_3.clone(), tally_GBC.clone()
        header_3[ROWS], header_3[HOST] = ABSENT, 0
        try:
            yield
        finally:
            header_3.copy_(before_3)
            tally_GBC.copy_(counted_GBC)

    def report(self) -> SpillReport:
        """The present figures; requests new ones: on CUDA they may be as old as the last report, or some passes."""
        counts = self.places.counts
        self._found = counts.read(self._row_bytes) or self._found  # requested before; a new request is rarely answered yet
        counts.start_reading()
        self._found = found = counts.read(self._row_bytes) or self._found
        return SpillReport(
            steps=self.steps,
            resident=found.resident,
            hits=found.hits,
            misses=found.fetched + found.read_through,
            read_through=found.read_through,
            fetched_bytes=found.fetched_bytes,
            staged_bytes=self.stages.copied_bytes,
            host_pages=self.row_pages.num_backed,
            hot_pages=len(self.row_pages.hot),
            hot_rows=self._hot_rows,
            beside_bytes=self._beside_bytes,
        )


def _spill_of(spec: ModelSpec) -> Spill:
    assert spec.spill is not None and len(spec.spill.states) == 1, f"{spec.name} is to spill one state, and has {spec.spill}"
    return spec.spill
