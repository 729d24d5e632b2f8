"""One rank's hands at the store: they move pages between host memory and a store, sealing and checking every value.

    page         one value under the page's key
    checkpoint   members under names made of their checksums, then a manifest that lists those checksums

What does not verify is a miss; it is deleted, so that a good copy can take its place. Runs on worker threads and
decides nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from stepwell.base.errand import Ask, Fate, FetchCheckpoint, FetchPages, Outcome, PutCheckpoint, PutPages, Task
from stepwell.base.errors import StoreError
from stepwell.base.ids import Kind
from stepwell.base.keys import Namespace, manifest_key, member_key
from stepwell.base.plan import PageIds
from stepwell.store.api import (
    MAX_LABEL_BYTES,
    MAX_TENANT_BYTES,
    NO_PARENT,
    Read,
    ReadOutcome,
    ReadResult,
    Space,
    Store,
    Write,
    WriteOutcome,
)
from stepwell.store.seal import Verdict, checksum, checksum_of, judge, seal, stamp, stamp_all

FIRST_BATCH_BYTES = 8 * 2**20  # before it is sealed, nothing can be written
WRITE_BATCH_BYTES = 32 * 2**20  # between two looks at whether the errand was called off
_HEAD = struct.Struct("<4sHHI")  # magic, version, window pages, point pages
_MEMBER = struct.Struct("<32s16sQ")  # key, checksum, length
_MAGIC, _VERSION = b"SWcp", 1

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

_OF_READ = {
    ReadOutcome.MISSING: Fate.MISSING,
    ReadOutcome.LENGTH: Fate.LENGTH,
    ReadOutcome.DAMAGED: Fate.DAMAGED,
    ReadOutcome.CANCELLED: Fate.CANCELLED,
    ReadOutcome.FAILED: Fate.FAILED,
}
_OF_VERDICT = {
    Verdict.INTACT: Fate.OK,
    Verdict.UNREADABLE: Fate.UNREADABLE,
    Verdict.VERSION: Fate.VERSION,
    Verdict.FOREIGN: Fate.FOREIGN,
    Verdict.SWAPPED: Fate.SWAPPED,
    Verdict.LENGTH: Fate.LENGTH,
    Verdict.DAMAGED: Fate.DAMAGED,
}
_OF_WRITE = {
    WriteOutcome.STORED: Fate.OK,
    WriteOutcome.EXISTS: Fate.OK,
    WriteOutcome.NO_ROOM: Fate.NO_ROOM,
    WriteOutcome.TOO_LARGE: Fate.NO_ROOM,
    WriteOutcome.FAILED: Fate.FAILED,
}


class HostPages(Protocol):
    """Host memory by page, as the store's hands need it."""

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy."""
        ...


class StoreHands:
    """Carries out store tasks for one rank of a model, in that rank's own namespaces."""

    def __init__(self, store: Store, memory: HostPages, *, rank: int = 0, ranks: int = 1) -> None:
        self._store = store
        self._memory = memory
        self._shard = f"{rank}/{ranks}"

    def run(self, namespace: Namespace, task: Task, cancelled: Callable[[], bool]) -> Outcome:
        """One task from start to end. Raises what the store raises."""
        space = self.space(namespace)
        if isinstance(task, Ask):
            found = self._contains(space, [*task.pages, *map(manifest_key, task.boundaries)])
            there, missing = Fate.OK, Fate.MISSING
            return Outcome(fates=tuple([there if each else missing for each in found]))
        if isinstance(task, FetchPages):
            return self._fetch_pages(space, task, cancelled)
        if isinstance(task, FetchCheckpoint):
            return self._fetch_checkpoint(space, task, cancelled)
        if isinstance(task, PutPages):
            return self._put_pages(space, task, cancelled)
        return self._put_checkpoint(space, task)

    def _contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        found = self._store.contains(space, keys)
        if len(found) != len(keys):
            raise StoreError(f"the store was asked for {len(keys)} keys and answered for {len(found)}")
        return found

    def _forget(self, space: Space, keys: list[bytes]) -> None:
        """Deletes what is no good. A store that cannot is left with it; the miss stands either way."""
        with suppress(StoreError):
            self._store.delete(space, keys)

    def space(self, namespace: Namespace) -> Space:
        """The part of the store that is this rank's share of a namespace. Says nothing of its salt."""
        label = namespace.model if namespace.adapter is None else f"{namespace.model} + {namespace.adapter}"
        return Space(
            digest=replace(namespace, shard=self._shard).digest,
            label=_cut(f"{label} [{self._shard}]", MAX_LABEL_BYTES),
            tenant=_cut(namespace.tenant or "", MAX_TENANT_BYTES),
        )

    # ---- upwards ----------------------------------------------------------------------------------

    def _read(self, space: Space, reads: Sequence[Read], cancelled: Callable[[], bool]) -> list[tuple[Fate, bytes]]:
        """What became of each read, and its stamp where all is well."""
        results = self._store.read_into(space, reads, cancelled=cancelled)
        fates = _judge(space, reads, results)
        if any(fate is not Fate.OK for fate in fates):
            bad = [read.key for read, fate in zip(reads, fates, strict=True) if fate.is_damage and fate is not Fate.VERSION]
            if bad:
                self._forget(space, bad)
        return [(fate, result.stamp) for fate, result in zip(fates, results, strict=True)]

    def _fetch_pages(self, space: Space, task: FetchPages, cancelled: Callable[[], bool]) -> Outcome:
        buffers = [self._memory.view(Kind.PREFIX, page) for page in task.ids.tolist()]
        reads = [Read(key=key, into=into) for key, into in zip(task.keys, buffers, strict=True)]
        fates = [fate for fate, _ in self._read(space, reads, cancelled)]
        moved = sum([len(into) for into, fate in zip(buffers, fates, strict=True) if fate is Fate.OK])
        return Outcome(fates=tuple(fates), moved_bytes=moved)

    def _fetch_checkpoint(self, space: Space, task: FetchCheckpoint, cancelled: Callable[[], bool]) -> Outcome:
        """The manifest, then every member it names, which must be the very bytes it was written for."""
        buffers = [view for _, view in self._members(task.windows, task.points)]
        name, manifest = manifest_key(task.boundary), memoryview(bytearray(_HEAD.size + len(buffers) * _MEMBER.size))
        ((fate, _),) = self._read(space, [Read(key=name, into=manifest)], cancelled)
        if fate is not Fate.OK:
            return Outcome(fates=(fate,))
        fate = self._fetch_members(space, manifest, task, buffers, cancelled)
        if fate.is_damage and fate is not Fate.VERSION:  # another version's values are somebody else's
            self._forget(space, [name])
        return Outcome(fates=(fate,), moved_bytes=sum(map(len, buffers)) if fate is Fate.OK else 0)

    def _fetch_members(
        self, space: Space, manifest: memoryview, task: FetchCheckpoint, buffers: list[memoryview], cancelled: Callable[[], bool]
    ) -> Fate:
        named = _parse(manifest, len(task.windows), len(task.points))
        if named is None:
            return Fate.UNREADABLE
        reads = [Read(key=key, into=into) for (key, _), into in zip(named, buffers, strict=True)]
        for (fate, stamped), (_, digest) in zip(self._read(space, reads, cancelled), named, strict=True):
            if fate is Fate.MISSING:
                return Fate.INCOMPLETE
            if fate is not Fate.OK:
                return fate
            if checksum_of(stamped) != digest:
                return Fate.MIXED
        return Fate.OK

    # ---- downwards --------------------------------------------------------------------------------

    def _put_pages(self, space: Space, task: PutPages, cancelled: Callable[[], bool]) -> Outcome:
        parents = [task.parent or NO_PARENT, *task.keys]
        found = self._contains(space, task.keys)
        fates = [Fate.OK] * len(task.keys)
        wanted = [index for index, there in enumerate(found) if not there]
        moved = 0

        def sealed(batch: list[int]) -> tuple[list[int], list[Write]]:
            return batch, self._seal(space, task, parents, batch)

        with closing(_ahead(sealed, self._batches(wanted, task.ids))) as batches:
            for batch, writes in batches:
                if cancelled():
                    fates[batch[0] :] = [Fate.CANCELLED] * (len(fates) - batch[0])
                    break
                for index, write, outcome in zip(batch, writes, self._store.write_from(space, writes), strict=True):
                    if outcome is WriteOutcome.STORED:
                        moved += len(write.data)
                    else:
                        fates[index] = _OF_WRITE[outcome]
        return Outcome(fates=tuple(fates), moved_bytes=moved)

    def _seal(self, space: Space, task: PutPages, parents: Sequence[bytes], batch: list[int]) -> list[Write]:
        """The values of some pages of a task, with their stamps."""
        pages = [self._memory.view(Kind.PREFIX, page) for page in task.ids[batch].tolist()]
        digests = list(map(checksum, pages))  # nothing else in between: it would have to be fetched from memory again each time
        keys = [task.keys[index] for index in batch]
        stamps = stamp_all(space, keys, [len(data) for data in pages], digests)
        return [
            Write(key=key, data=data, stamp=stamped, parent=parents[index], depth=task.first + index)
            for index, key, data, stamped in zip(batch, keys, pages, stamps, strict=True)
        ]

    def _batches(self, wanted: list[int], ids: PageIds) -> list[list[int]]:
        """What is written together: little at first, because nothing is being written while it is sealed, then twice as much."""
        batches, size = [], FIRST_BATCH_BYTES
        page_bytes = max(len(self._memory.view(Kind.PREFIX, int(ids[0]))), 1) if wanted else 1
        while wanted:
            step = max(size // page_bytes, 1)
            batches.append(wanted[:step])
            wanted, size = wanted[step:], min(2 * size, WRITE_BATCH_BYTES)
        return batches

    def _put_checkpoint(self, space: Space, task: PutCheckpoint) -> Outcome:
        """Members first; the manifest only when all of them are there."""
        name = manifest_key(task.boundary)
        if self._contains(space, [name]) == [True]:
            return Outcome(fates=(Fate.OK,))
        pages = (*task.window_keys, *[task.boundary] * len(task.points))
        writes, listed, parent = [], [], bytes(task.boundary)
        for depth, (page, (kind, data)) in enumerate(zip(pages, self._members(task.windows, task.points), strict=True)):
            digest = checksum(data)
            key = member_key(page, kind.label, digest)
            stamped = stamp(space, key, length=len(data), digest=digest)
            writes.append(
                Write(key=key, data=data, stamp=stamped, parent=parent, depth=task.page + depth, group=bytes(task.boundary))
            )
            listed.append((key, digest, len(data)))
            parent = key
        outcomes = self._store.write_from(space, writes)
        fate = next((fate for fate in map(_OF_WRITE.__getitem__, outcomes) if fate is not Fate.OK), Fate.OK)
        if fate is Fate.OK:
            manifest = memoryview(_manifest(len(task.windows), len(task.points), listed))
            stamped = seal(space, name, manifest)
            depth = task.page + len(writes)
            last = Write(key=name, data=manifest, stamp=stamped, parent=parent, depth=depth, group=bytes(task.boundary))
            fate = _OF_WRITE[self._store.write_from(space, [last])[0]]
        stored = zip(writes, outcomes, strict=True)
        return Outcome(fates=(fate,), moved_bytes=sum(len(w.data) for w, outcome in stored if outcome is WriteOutcome.STORED))

    def _members(self, windows: PageIds, points: PageIds) -> Iterator[tuple[Kind, memoryview]]:
        for kind, ids in ((Kind.WINDOW, windows), (Kind.POINT, points)):
            for page in ids.tolist():
                yield kind, self._memory.view(kind, page)


def _judge(space: Space, reads: Sequence[Read], results: Sequence[ReadResult]) -> list[Fate]:
    """What came of each read. Everything that came is verified."""
    came = [result.outcome is ReadOutcome.FOUND for result in results]
    digests = [checksum(read.into) if here else b"" for read, here in zip(reads, came, strict=True)]  # nothing else in between
    lengths = [len(read.into) for read in reads]
    expected = stamp_all(space, [read.key for read in reads], lengths, digests)
    fates = [Fate.OK] * len(reads)
    for at, (result, stamped, here) in enumerate(zip(results, expected, came, strict=True)):
        if not here:
            fates[at] = _OF_READ[result.outcome]
        elif result.stamp != stamped:  # why not?
            fates[at] = _OF_VERDICT[judge(space, reads[at].key, result.stamp, length=lengths[at], digest=digests[at])]
    return fates


def _ahead(make: Callable[[_Item], _Made], items: Sequence[_Item]) -> Generator[_Made, None, None]:
    """Makes one thing of each item, in order, the next while the caller is busy with the one before."""
    if len(items) < 2:
        yield from map(make, items)
        return
    with ThreadPoolExecutor(1, "stepwell-seal") as helper:
        coming = helper.submit(make, items[1])
        yield make(items[0])
        for item in items[2:]:
            made = coming.result()
            coming = helper.submit(make, item)
            yield made
        yield coming.result()


def _manifest(windows: int, points: int, listed: Sequence[tuple[bytes, bytes, int]]) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, windows, points) + b"".join(_MEMBER.pack(*member) for member in listed)


def _parse(manifest: memoryview, windows: int, points: int) -> list[tuple[bytes, bytes]] | None:
    """Keys and checksums of the members; None unless it is a manifest of exactly this shape."""
    if len(manifest) != _HEAD.size + (windows + points) * _MEMBER.size:
        return None
    if _HEAD.unpack_from(manifest) != (_MAGIC, _VERSION, windows, points):
        return None
    return [(key, digest) for key, digest, _ in _MEMBER.iter_unpack(manifest[_HEAD.size :])]


def _cut(text: str, size: int) -> str:
    """The text without what would not fit into `size` bytes."""
    return text.encode()[:size].decode(errors="ignore")
