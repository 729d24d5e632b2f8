"""A stand-in for a model: what it "computes" is a digest of everything the bytes must depend on.

Each row it writes is a stream of bytes drawn from (namespace, tokens so far, state, layer, rank). So a page that
belongs to another path, another boundary, another state or another namespace, or that was freed, can be
told from the right one by reading it. Writes and checks pages through a lease, as a real engine would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind, Tier
from stepwell.base.plan import PageIds
from stepwell.base.spec import ModelSpec, Part, Point, Prefix
from stepwell.base.tokens import TOKEN_BYTES
from stepwell.cache.lease import Lease
from stepwell.transfer.memory import PageMemory

POISON = 0xDB


class WrongBytes(AssertionError):
    """A page a lease exposes does not hold what was saved for it."""


class DigestEngine:
    """Computes and checks one model's pages over the device memories of one or more ranks."""

    def __init__(self, spec: ModelSpec, ranks: Sequence[Mapping[Tier, PageMemory]]) -> None:
        self._spec = spec
        self._ranks = ranks
        self.rows_checked = 0
        self.bytes_checked = 0

    # ---- what a model does ------------------------------------------------------------------------

    def compute(self, lease: Lease, upto: int) -> None:
        """Writes everything tokens `[position, upto)` leave behind. The lease has pages for them."""
        for rank, memories in enumerate(self._ranks):
            for where, expected in self._rows(lease, lease.position, upto, memories[Tier.DEVICE], rank, computing=True):
                where[:] = expected

    def check(self, lease: Lease) -> None:
        """Raises WrongBytes unless every byte the lease may read is the one that was saved."""
        start = lease.position
        for rank, memories in enumerate(self._ranks):
            for where, expected in self._rows(lease, 0, start, memories[Tier.DEVICE], rank, computing=False):
                self.rows_checked += 1
                self.bytes_checked += len(expected)
                if where.tobytes() != expected.tobytes():
                    raise WrongBytes(
                        f"{lease}, rank {rank}: found {where[:8].tobytes().hex()}, saved {expected[:8].tobytes().hex()}"
                    )

    def poison(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        """Overwrites freed pages, so that reading one shows. Give it to `build_cache(on_free=...)`."""
        for memories in self._ranks:
            memories[tier].rows(kind)[ids] = POISON

    # ---- inside -----------------------------------------------------------------------------------

    def _rows(
        self, lease: Lease, start: int, upto: int, memory: PageMemory, rank: int, *, computing: bool
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Pairs of a row in memory and what it must hold, for every row that tokens `[start, upto)` complete."""
        spec = self._spec
        seeds = _Seeds(lease, rank)
        for part in spec.parts(Kind.PREFIX):
            shape = spec.state(part.state).shape
            assert isinstance(shape, Prefix)
            for group in range(start // shape.ratio, upto // shape.ratio):
                end = (group + 1) * shape.ratio
                page = (end - 1) // spec.page_tokens
                row = group - (page * spec.page_tokens) // shape.ratio
                yield from self._layers(memory, Kind.PREFIX, lease.prefix_pages[page], part, row, seeds.at(end))
        first = start if computing else max(upto - spec.window_tokens, 0)
        for part in spec.parts(Kind.WINDOW):
            for token in range(max(first, lease.first_window * spec.window_page_tokens), upto):
                index, row = divmod(token, spec.window_page_tokens)
                page = lease.window_pages[index - lease.first_window]
                yield from self._layers(memory, Kind.WINDOW, page, part, row, seeds.at(token + 1))
        if upto and len(lease.point_pages):
            for part in spec.parts(Kind.POINT):
                shape = spec.state(part.state).shape
                assert isinstance(shape, Point)
                for row in range(min(shape.rows_at(upto), part.rows)):  # between boundaries a group may be longer
                    yield from self._layers(memory, Kind.POINT, lease.point_pages[0], part, row, seeds.at(upto))

    def _layers(
        self, memory: PageMemory, kind: Kind, page: int, part: Part, row: int, seed: bytes
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        bytes_ = memory.rows(kind)[int(page)][part.offset : part.offset + part.size_bytes]
        table = bytes_.reshape(part.layers, part.rows, part.row_bytes)
        for layer in range(part.layers):
            name = f"{part.state}/{layer}/{row}".encode()
            stream = hashlib.shake_128(seed + name).digest(part.row_bytes)
            yield table[layer, row % part.rows], np.frombuffer(stream, np.uint8)


class _Seeds:
    """A digest of namespace, rank and the first n tokens, for every n, computed as far as it is asked."""

    def __init__(self, lease: Lease, rank: int) -> None:
        self._packed = lease.packed
        self._chain = [hashlib.blake2b(lease.namespace.digest + rank.to_bytes(2, "little"), digest_size=16).digest()]

    def at(self, tokens: int) -> bytes:
        while len(self._chain) <= tokens:
            start = (len(self._chain) - 1) * TOKEN_BYTES
            token = self._packed[start : start + TOKEN_BYTES]
            self._chain.append(hashlib.blake2b(self._chain[-1] + token, digest_size=16).digest())
        return self._chain[tokens]
