"""Locates the attention rows of prefix pages: in a page on the device, in a hot slot on the device, or in a page on the host.

    prefix page   header: ordinal | its rows page, or -1 | its host page, or -1       always exactly one of the two
                  hint of a row and group: the hot slot to look in, or anything else
    hot slot      key: the row it holds, or -1             slot s of hot page n:  n = s // R, row s % R of that page
                  stamp: the last pass that used it

A row is in hot slot `s` only if the key of `s` says so. A hint proves nothing: a wrong hint costs a fetch, and never serves a
wrong row. Keys are in memory that nothing else uses.

`apply` is the only writer besides `resolve`: it must run before every pass, also before a replayed graph. Does not decide which
pages are where. Axes: P pages (prefix, rows or host pages), L layers, G groups of layers that share a selection, R rows of a
page, E stored elements of a row, N hot pages by number, S hot slots (N x R).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.spill import HEADER_FIELDS
from stepwell.memory.row_pages import ABSENT, Changes
from stepwell.sparse.counts import Counts

ORDINAL, ROWS, HOST = range(len(HEADER_FIELDS))  # the fields of a header
MOST_ROWS = 2**31 - 1  # row numbers are int32
LAST_PASS = 2**31 - 2  # stamps are int32


def check_pages(page_rows: int, **pages: int) -> None:
    """Raises ConfigError if the rows of device, host or hot pages are too many for 32-bit numbers."""
    settings = {"device": "device_memory", "host": "host_memory", "hot": "hot_rows or max_running"}
    for name, count in pages.items():
        if count * page_rows > MOST_ROWS:
            raise ConfigError(
                f"rows that spill have 32-bit numbers: {count:,} {name} pages of {page_rows} rows are too many, "
                f"{MOST_ROWS // page_rows:,} are the most; lower {settings[name]}"
            )


class Where(NamedTuple):
    """Row numbers (page x R + row), on the device or else on the host; ABSENT in the other."""

    device: torch.Tensor
    host: torch.Tensor


class Places:
    """One spilling state: views of the bytes of both tiers, and the tables of hot slots."""

    def __init__(
        self,
        *,
        rows_PLRE: torch.Tensor,
        host_PLRE: torch.Tensor,
        slot_PGR: torch.Tensor,
        header_P3: torch.Tensor,
        numbers: int,
        requests: int,
    ) -> None:
        """For up to `numbers` hot pages, and `requests` per batch. Raises ConfigError for too many."""
        page_rows = rows_PLRE.shape[2]
        assert rows_PLRE.shape[1:] == host_PLRE.shape[1:], f"{rows_PLRE.shape=} {host_PLRE.shape=}"
        assert slot_PGR.shape[2] == page_rows and header_P3.shape[1] == 3, f"{slot_PGR.shape=} {header_P3.shape=}"
        assert slot_PGR.dtype == header_P3.dtype == torch.int32 and slot_PGR.stride(2) == header_P3.stride(1) == 1
        check_pages(page_rows, device=max(len(rows_PLRE), len(slot_PGR)), host=len(host_PLRE), hot=numbers)
        self.rows_PLRE, self.host_PLRE, self.slot_PGR, self.header_P3 = rows_PLRE, host_PLRE, slot_PGR, header_P3
        self.page_rows, self.groups, self.slots = page_rows, slot_PGR.shape[1], numbers * page_rows
        device = slot_PGR.device
        self.key_GS = torch.full((self.groups, self.slots), ABSENT, dtype=torch.int32, device=device)
        self.stamp_GS = torch.zeros_like(self.key_GS)
        # Scratch of `resolve`: the scores of the held rows.
        self.worth_S = torch.zeros(self.slots, dtype=torch.float32, device=device)
        self.hot_N = torch.full((numbers,), ABSENT, dtype=torch.int32, device=device)  # the rows page of each number
        self.now_1 = torch.zeros(1, dtype=torch.int32, device=device)  # passes so far
        self.counts = Counts(groups=self.groups, requests=requests, device=device)
        self._passes = 0  # the value of `now_1`, kept on the host

    @property
    def device(self) -> torch.device:
        return self.slot_PGR.device

    @staticmethod
    def table_bytes(*, slots: int, groups: int) -> int:
        """The device memory for the tables of `slots` hot slots, without the rows themselves."""
        return (8 * groups + 4) * slots

    def apply(self, changes: Changes) -> None:
        """Begins a pass: on the current stream, after the last pass and before any work of the next."""
        if self._passes == LAST_PASS:
            self._begin_anew()
        self._passes += 1
        self.now_1 += 1
        parts = (changes.new, changes.pages, changes.header_N3.reshape(-1), changes.numbers, changes.hot_pages)
        if not sum(map(len, parts)):
            return
        packed = torch.from_numpy(np.concatenate(parts, dtype=np.int32))
        packed = (packed.pin_memory() if self.device.type == "cuda" else packed).to(self.device, non_blocking=True)
        new, pages, headers, numbers, hot_pages = packed.split([len(part) for part in parts])
        if len(new):
            self.slot_PGR.index_fill_(0, new.long(), ABSENT)
        if len(pages):
            self.header_P3[pages.long()] = headers.view(-1, 3)
        if len(numbers):
            self.hot_N[numbers.long()] = hot_pages
            self.key_GS.view(self.groups, -1, self.page_rows).index_fill_(1, numbers.long(), ABSENT)

    def _begin_anew(self) -> None:
        """Restarts pass numbers at 1 when they are used up. No row is hot after that."""
        self._passes = 0
        self.now_1.zero_()
        self.stamp_GS.zero_()
        self.key_GS.fill_(ABSENT)

    def where(self, page: torch.Tensor, row: torch.Tensor, group: int) -> Where:
        """Where rows are now, for any shape. Changes nothing, and does not wait."""
        page, row = page.long(), row.long()
        header = self.header_P3[page].long()
        slot, hit = self.hot_slot(page, row, group)
        slot = slot.clamp(0, max(self.slots - 1, 0))
        hot = self.hot_N[slot // self.page_rows].long() * self.page_rows + slot % self.page_rows if self.slots else slot
        bound = header[..., ROWS] >= 0
        device = torch.where(bound, header[..., ROWS] * self.page_rows + row, torch.where(hit, hot, ABSENT))
        host = torch.where((device < 0) & (header[..., HOST] >= 0), header[..., HOST] * self.page_rows + row, ABSENT)
        return Where(device, host)

    def hot_slot(self, page: torch.Tensor, row: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot that each row's hint names, and whether that slot holds the row."""
        hint = self.slot_PGR[page.long(), group, row.long()].long()
        sane = (hint >= 0) & (hint < self.slots)
        if not self.slots:
            return hint, sane
        held = self.key_GS[group, hint.clamp(0, self.slots - 1)]
        return hint, sane & (held == page * self.page_rows + row)

    def read(self, layer: int, page: torch.Tensor, row: torch.Tensor, group: int) -> torch.Tensor:
        """The stored rows `[..., E]`, on the device. On CUDA it waits, since torch reads the host's rows."""
        where = self.where(page, row, group)
        assert bool(((where.device >= 0) | (where.host >= 0)).all()), "a page has rows neither on the device nor on the host"
        there, here = self._some(self.rows_PLRE[:, layer], where.device), self._some(self.host_PLRE[:, layer], where.host)
        return torch.where((where.device >= 0)[..., None], there, here)

    def _some(self, stored_PRE: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        at = number.clamp_min(0).to(stored_PRE.device)
        return stored_PRE[at // self.page_rows, at % self.page_rows].to(self.device)


class Read(Protocol):
    """As `Places.read`."""

    def __call__(self, places: Places, layer: int, page: torch.Tensor, row: torch.Tensor, group: int, /) -> torch.Tensor: ...
