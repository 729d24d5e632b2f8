r"""Host memory of one pool: pages by SGLang's names for them, how often each is in use, and which one leaves next.

    taken  --publish-->  held  --pin--> pinned --unpin--> held       what is held may be evicted, the least recently used first
       \--give_back--> free <-------------- evicted ------/

A name is its whole prefix's, so pages stand for themselves: no tree. Copies nothing. Not for several threads: its user has a
lock. `HostPool` reads it like one of SGLang's own pools.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 4096  # of a page, for direct I/O


@dataclass(slots=True, eq=False)
class HeldPage:
    """One page that has its bytes."""

    key: str
    at: int
    users: int = 0
    is_stored: bool = False  # as far as is known here
    is_named: bool = True  # else nobody finds it any more, and it is free when its users are gone


def stride_of(page_bytes: int) -> int:
    return -(-page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostPages:
    """Pages `[num_pages, page_bytes]` over given memory."""

    page_size = 1  # of its indices: each is a page

    def __init__(self, memory: torch.Tensor, *, page_bytes: int, pool_class: str, meaning: str) -> None:
        stride = stride_of(page_bytes)
        self._rows = memory[: memory.numel() // stride * stride].view(-1, stride)
        self.rows = self._rows[:, :page_bytes]
        self.pool_class, self.layout = pool_class, meaning
        self.num_pages = len(self.rows)
        self._free = list(range(self.num_pages))[::-1]
        self._taken: set[int] = set()
        self._held: dict[str, HeldPage] = {}
        self._idle: OrderedDict[str, HeldPage] = OrderedDict()  # held and unused, the least recent first
        self._unnamed: set[HeldPage] = set()
        self.evicted = 0

    # ---- questions ----------------------------------------------------------------------------------

    def holds(self, keys: Iterable[str]) -> list[bool]:
        return [key in self._held for key in keys]

    def get(self, key: str) -> HeldPage | None:
        return self._held.get(key)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pinned(self) -> int:
        return len(self._held) - len(self._idle) + len(self._unnamed)

    # ---- orders -------------------------------------------------------------------------------------

    def take(self) -> int | None:
        """A page to fill, for which another may have to leave; None where all are in use."""
        if not self._free:
            if not self._idle:
                return None
            key, page = self._idle.popitem(last=False)
            del self._held[key]
            self._free.append(page.at)
            self.evicted += 1
        at = self._free.pop()
        self._taken.add(at)
        return at

    def give_back(self, at: int) -> None:
        """A page that was taken is not needed, or could not be filled."""
        self._taken.remove(at)
        self._free.append(at)

    def publish(self, key: str, at: int, *, is_stored: bool) -> HeldPage:
        """A page that was taken has its bytes. Where its name has a page by now, that one is kept."""
        known = self._held.get(key)
        if known is not None:
            self.give_back(at)
            known.is_stored |= is_stored
            return known
        self._taken.remove(at)
        page = self._held[key] = self._idle[key] = HeldPage(key, at, is_stored=is_stored)
        return page

    def pin(self, page: HeldPage) -> None:
        assert page.is_named, f"{page.key} was forgotten"
        if not page.users:
            del self._idle[page.key]
        page.users += 1

    def unpin(self, pages: Sequence[HeldPage]) -> None:
        """Ends one use of each. The first of them will be the last to leave: others are of no use without it."""
        for page in reversed(pages):
            assert page.users > 0, f"{page.key} is not pinned"
            page.users -= 1
            if page.users:
                continue
            if page.is_named:
                self._idle[page.key] = page
            else:
                self._unnamed.remove(page)
                self._free.append(page.at)

    def touch(self, keys: Sequence[str]) -> None:
        """As if they were pinned and unpinned."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def forget_all(self) -> None:
        """No page is found any more. Those in use are free when their users are gone."""
        for page in self._held.values():
            page.is_named = False
            if page.users:
                self._unnamed.add(page)
            else:
                self._free.append(page.at)
        self._held.clear()
        self._idle.clear()

    def audit(self) -> None:
        """Asserts that every page is free, being filled or held, once."""
        held = [page.at for page in (*self._held.values(), *self._unnamed)]
        everywhere = sorted([*self._free, *self._taken, *held])
        assert everywhere == list(range(self.num_pages)), f"pages are lost or twice: {self.num_pages=} {len(everywhere)=}"
        for key, page in self._held.items():
            assert page.key == key and page.is_named, f"{key} is not what it is called"
            assert (page.users == 0) == (key in self._idle), f"{key}: {page.users=}, idle: {key in self._idle}"
        assert all(page.users and not page.is_named for page in self._unnamed), "a forgotten page is kept without users"

    # ---- as a pool of SGLang's ----------------------------------------------------------------------

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self._rows]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, stride, size = int(self._rows.data_ptr()), int(self._rows.shape[1]), int(self.rows.shape[1])
        return [base + at * stride for at in indices.tolist()], [size] * len(indices)
