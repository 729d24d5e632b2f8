"""A stand-in for a model: what it "computes" is a digest of everything the bytes must depend on.

Each row it writes is a stream of bytes drawn from (namespace, tokens so far, state, layer, rank). So a page that
belongs to another path, another boundary, another state or another namespace, or that was freed, can be
distinguished from the right one by reading it. Writes and checks pages through a lease, as a real engine would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import TOKEN_BYTES, Namespace
from stepwell.base.spec import ModelSpec, Part, Point, Prefix
from stepwell.base.tasks import PageIds
from stepwell.memory.row_pages import ABSENT, RowPages
from stepwell.tiers.lease import Lease
from stepwell.transfer.copy_engine import Bytes, PageMemory

POISON = 0xDB


class WrongBytes(AssertionError):
    """A page a lease exposes does not hold what was saved for it."""


class Pages(NamedTuple):
    """Pages of one tier with what the first tokens of a path left behind, as a lease names its own."""

    namespace: Namespace
    packed: bytes
    prefix_pages: PageIds  # ABSENT for pages that are in another tier
    window_pages: PageIds  # none of them, or all
    first_window: int
    point_pages: PageIds


class DigestEngine:
    """Computes and checks one model's pages over the device memories of one or more ranks."""

    def __init__(self, spec: ModelSpec, ranks: Sequence[Mapping[Tier, PageMemory]]) -> None:
        self._spec = spec
        self._ranks = ranks
        self.row_pages: RowPages | None = None  # of a cache whose rows may spill: set once it is built
        self.rows_checked = 0
        self.bytes_checked = 0

    # ---- what a model does ------------------------------------------------------------------------

    def compute(self, lease: Lease, upto: int) -> None:
        """Writes everything tokens `[position, upto)` leave behind. The lease has pages for them."""
        for rank, memories in enumerate(self._ranks):
            for where, expected in self._rows(lease, Tier.DEVICE, lease.position, upto, memories, rank, computing=True):
                where[:] = np.frombuffer(expected, np.uint8).reshape(where.shape)

    def copy_point(self, lease: Lease, target: int) -> None:
        """Copies the lease's point state, as a pass does that ends at a stop."""
        for memories in self._ranks:
            points = memories[Tier.DEVICE].rows(Kind.POINT)
            points[target] = points[int(lease.point_pages[0])]

    def check(self, lease: Lease) -> None:
        """Raises WrongBytes unless every byte the lease may read is the one that was saved."""
        self._check(lease, Tier.DEVICE, lease.position)

    def check_pages(self, pages: Pages, tier: Tier, upto: int) -> None:
        """Raises WrongBytes unless these pages hold what tokens `[0, upto)` of their path left behind."""
        self._check(pages, tier, upto)

    def _check(self, held: Lease | Pages, tier: Tier, upto: int) -> None:
        for rank, memories in enumerate(self._ranks):
            for where, expected in self._rows(held, tier, 0, upto, memories, rank, computing=False):
                self.rows_checked += len(where)
                self.bytes_checked += len(expected)
                found = where.tobytes()
                if found != expected:
                    at = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
                    raise WrongBytes(
                        f"{held}, rank {rank}: found {found[at : at + 8].hex()}, saved {expected[at : at + 8].hex()}"
                    )

    def poison(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        """Overwrites freed pages, so that reading one shows. Give it to `build_cache(on_free=...)`."""
        for memories in self._ranks:
            memories[tier].rows(kind)[ids] = POISON

    # ---- inside -----------------------------------------------------------------------------------

    def _rows(
        self, held: Lease | Pages, tier: Tier, start: int, upto: int, memories: Mapping[Tier, PageMemory], rank: int, *,
        computing: bool,
    ) -> Iterator[tuple[Bytes, bytes]]:  # fmt: skip
        """Pairs of a row in memory, `[layer][byte]`, and what it must hold, for all rows that tokens `[start, upto)` complete."""
        spec, memory = self._spec, memories[tier]
        seeds = _seeds(held.namespace.digest, rank, held.packed)
        for part in spec.parts(Kind.PREFIX):
            shape = spec.state(part.state).shape
            assert isinstance(shape, Prefix)
            rows_of = self._rows_of(memories, part, tier)
            for group in range(start // shape.ratio, upto // shape.ratio):
                end = (group + 1) * shape.ratio
                page = (end - 1) // spec.page_tokens
                row = group - (page * spec.page_tokens) // shape.ratio
                where = int(held.prefix_pages[page])
                if where != ABSENT:
                    yield rows_of(where)[:, row % part.rows], _saved(part, row, seeds[end])
        first = start if computing else max(upto - spec.window_tokens, 0)
        for part in spec.parts(Kind.WINDOW) if not isinstance(held, Pages) or len(held.window_pages) else ():
            table, pages = _table(memory, Kind.WINDOW, part), held.window_pages
            for token in range(max(first, held.first_window * spec.window_page_tokens), upto):
                index, row = divmod(token, spec.window_page_tokens)
                yield table[pages[index - held.first_window], :, row % part.rows], _saved(part, row, seeds[token + 1])
        if upto and len(held.point_pages):
            for part in spec.parts(Kind.POINT):
                shape = spec.state(part.state).shape
                assert isinstance(shape, Point)
                table, page = _table(memory, Kind.POINT, part), int(held.point_pages[0])
                for row in range(min(shape.rows_at(upto), part.rows)):  # between boundaries a group may be longer
                    yield table[page, :, row % part.rows], _saved(part, row, seeds[upto])

    def _rows_of(self, memories: Mapping[Tier, PageMemory], part: Part, tier: Tier) -> Callable[[int], Bytes]:
        """Where a part of a tier's page is, `[layer][row][byte]`, by the page's id: rows of the device that spilled are on the
        host.
        """
        if tier is not Tier.DEVICE:
            there = _table(memories[tier], Kind.PREFIX, part)
            return lambda page: there[page]
        return self._device_rows_of(memories, part)

    def _device_rows_of(self, memories: Mapping[Tier, PageMemory], part: Part) -> Callable[[int], Bytes]:
        spec, row_pages = self._spec, self.row_pages
        device, host = memories[Tier.DEVICE], memories.get(Tier.HOST)
        kind = Kind.ROWS if spec.spill is not None and part.state in spec.spill.states else Kind.PREFIX
        there = next(each for each in spec.device_parts(kind) if each.state == part.state)
        table = _table(device, kind, there)
        if kind is Kind.PREFIX:
            return lambda page: table[page]
        assert row_pages is not None and host is not None, "rows may spill, but `row_pages` is not set"
        host_table = _table(host, Kind.PREFIX, part)

        def rows_of(page: int) -> Bytes:
            rows, backing = int(row_pages.rows[page]), int(row_pages.host[page])
            assert (rows == ABSENT) != (backing == ABSENT), f"page {page} has {rows=} {backing=}"
            return np.asarray(table[rows] if rows != ABSENT else host_table[backing])

        return rows_of


def _table(memory: PageMemory, kind: Kind, part: Part) -> Bytes:
    """A part of all pages of a kind, `[page id][layer][row][byte]`, without a copy."""
    bytes_ = memory.rows(kind)[:, part.offset : part.offset + part.size_bytes]
    shape = (len(bytes_), part.layers, part.rows, part.row_bytes)
    return np.lib.stride_tricks.as_strided(bytes_, shape, (bytes_.strides[0], part.layer_stride, part.row_stride, 1))


@lru_cache(maxsize=1 << 16)  # the same pages are checked again after every step of a random life
def _saved(part: Part, row: int, seed: bytes) -> bytes:
    """What a row holds in all layers."""
    names = (f"{part.state}/{layer}/{row}".encode() for layer in range(part.layers))
    return b"".join(hashlib.shake_128(seed + name).digest(part.row_bytes) for name in names)


@lru_cache(maxsize=256)
def _seeds(namespace: bytes, rank: int, packed: bytes) -> list[bytes]:
    """A digest of namespace, rank and the first n tokens, for every n."""
    chain = [hashlib.blake2b(namespace + rank.to_bytes(2, "little"), digest_size=16).digest()]
    for start in range(0, len(packed), TOKEN_BYTES):
        chain.append(hashlib.blake2b(chain[-1] + packed[start : start + TOKEN_BYTES], digest_size=16).digest())
    return chain
