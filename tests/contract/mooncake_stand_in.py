"""A stand-in for Mooncake's client: a dictionary that answers with the codes of the real one, over real addresses.

For what must be proved wherever the tests run, wheel or not; the real master and clients are in `tests/mooncake`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

from stepwell.store.mooncake.client import Client


class StandIn:
    """As much of `MooncakeDistributedStore` as the adapter calls, with its answers measured from version 0.3.13."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.groups: dict[str, str] = {}
        self.registered: dict[int, int] = {}
        self.slices: list[int] = []  # of each value moved, in order
        self.calls: list[int] = []  # values moved in each call
        self.codes: list[int] = []  # answers to give before anything is done, one for each value put or got
        self.down = False
        self.slow = lambda: None  # called within every transfer
        self.closed = False

    def register_buffer(self, address: int, size: int) -> int:
        if any(address < start + length and start < address + size for start, length in self.registered.items()):
            return -600
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else -600

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [-900 if self.down else int(name in self.values) for name in names]

    def batch_put_from_multi_buffers(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]], terms: object
    ) -> list[int]:
        groups = terms if isinstance(terms, list) else []
        assert len(groups) == len(names), "one group for each name"
        self.calls.append(len(names))
        self.slow()
        return [self._put(*each) for each in zip(names, pointers, sizes, groups, strict=True)]

    def batch_get_into_multi_buffers(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        assert len(set(names)) == len(names), "of a name twice the real one fills one buffer, and says both"
        self.calls.append(len(names))
        self.slow()
        return [self._get(*each) for each in zip(names, pointers, sizes, strict=True)]

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        return [-706 if not force else 0 if self.values.pop(name, None) is not None else -704 for name in names]

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        matching = [name for name in self.values if re.search(pattern, name)]
        assert force, "leased values would stay"
        for name in matching:
            del self.values[name]
        return -900 if self.down else len(matching)

    def get_size(self, name: str) -> int:
        return len(self.values[name]) if name in self.values else -704

    def close(self) -> int:
        assert not self.registered, f"{len(self.registered)} region(s) were left registered"
        self.closed = True
        return 0

    def _put(self, name: str, pointers: list[int], sizes: list[int], group: str) -> int:
        self._check(pointers, sizes)
        code = self.codes.pop(0) if self.codes else 0
        if code == 0 and name not in self.values:
            self.values[name] = b"".join(ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True))
            self.groups[name] = group
        return code

    def _get(self, name: str, pointers: list[int], sizes: list[int]) -> int:
        self._check(pointers, sizes)
        code = self.codes.pop(0) if self.codes else 0
        if code or name not in self.values:
            return code or -704
        value = self.values[name]
        if len(value) != sum(sizes):
            return -600 if sum(sizes) < len(value) else -800
        for at, size in zip(pointers, sizes, strict=True):
            ctypes.memmove(at, value[:size], size)
            value = value[size:]
        return sum(sizes)

    def _check(self, pointers: list[int], sizes: list[int]) -> None:
        assert not self.closed, "a closed client was called: the real one would end the process"
        self.slices.append(len(pointers))
        for at, size in zip(pointers, sizes, strict=True):
            inside = any(start <= at and at + size <= start + length for start, length in self.registered.items())
            assert inside, f"{size} bytes that are not registered"


def join(raw: StandIn) -> Callable[[], Client]:
    """What joins a cluster with the stand-in for a client; again after it left."""

    def joined() -> Client:
        raw.closed = False
        return Client(raw, lambda groups, pinned: groups, address="nowhere:0")

    return joined
