"""What passes would write of changed row pages, written into real memory, and checked there before each pass.

Freed pages are poisoned by the world, so a page that comes back without being called new, or a copy that writes over what is the
device's own, shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stepwell import Kind, Lease, ModelSpec, Tier
from stepwell.base.spec import Part
from stepwell.base.spec.spill import HEADER, SLOT
from stepwell.memory.row_pages import RowPages
from stepwell.transfer.copy_engine import PageMemory

Words = np.ndarray  # int32


class HeaderWatch:
    """Headers of one cache whose rows may spill, over the memories of all its ranks."""

    def __init__(self, spec: ModelSpec, ranks: Sequence[Mapping[Tier, PageMemory]], row_pages: RowPages) -> None:
        self._row_pages = row_pages
        parts = {part.state: part for part in spec.device_parts(Kind.PREFIX)}
        pages = [memories[Tier.DEVICE].rows(Kind.PREFIX) for memories in ranks]
        self._slots = [_words(rows, parts[SLOT]) for rows in pages]
        self._headers = [_words(rows, parts[HEADER]) for rows in pages]
        self._hints: dict[int, int] = {}  # what the slots of a page hold, since it was new
        self._hot: dict[int, int] = {}

    def before_pass(self, leases: Sequence[Lease]) -> None:
        """Applies what changed, as a pass would, and checks what the pages of these leases say of themselves."""
        changes = self._row_pages.drain()
        assert self._row_pages.placed(changes.pages).all(), "a header would be written into a page that is free"
        for page in changes.new.tolist():
            self._hints[page] = self._hints.get(page, 0) + 1
        for rank, slots in enumerate(self._slots):
            for page in changes.new.tolist():
                slots[page] = self._hints[page]
            for page, header in zip(changes.pages.tolist(), changes.header_N3, strict=True):
                self._headers[rank][page] = header
        self._hot.update(zip(changes.numbers.tolist(), changes.hot_pages.tolist(), strict=True))
        for lease in leases:
            self._check(lease)

    def _check(self, lease: Lease) -> None:
        placed = self._row_pages.placed(lease.prefix_pages)
        for index, page in enumerate(lease.prefix_pages.tolist()):
            if placed[index]:
                wanted = [index, int(self._row_pages.rows[page]), int(self._row_pages.host[page])]
                for slots, headers in zip(self._slots, self._headers, strict=True):
                    assert headers[page].tolist() == wanted, f"{lease}: page {page} says {headers[page]}, not {wanted}"
                    assert (slots[page] == self._hints[page]).all(), f"{lease}: page {page} has hints of another: {slots[page]}"
        assert [self._hot[number] for number in lease.hot_numbers.tolist()] == lease.hot_pages.tolist(), lease


def _words(rows: np.ndarray, part: Part) -> Words:
    """A part of all pages as `[page][word]`, without a copy."""
    table = rows[:, part.offset : part.offset + part.size_bytes]
    return np.lib.stride_tricks.as_strided(table.view(), table.shape, table.strides).view(np.int32)
