"""One rank's hands at the store: they move pages between host memory and a store, sealing and checking every value.

    page         one value under the page's key
    checkpoint   members under names made of their digests, then a manifest that lists those digests

With a key, all of it is in spaces of that key and stamped with it. What does not verify is a miss; it is deleted, so that a
good copy can take its place. A put has two halves, so that one errand can be sealed while the one before is being written:
`seal` asks and hashes, `put` writes. Runs on worker threads and decides nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hmac import compare_digest
from itertools import starmap
from typing import NamedTuple, Protocol

from stepwell.base.errand import Ask, Fate, FetchCheckpoint, FetchPages, Outcome, PutCheckpoint, PutPages, Task, num_items
from stepwell.base.errors import StoreError
from stepwell.base.ids import Kind
from stepwell.base.keys import Namespace, manifest_key, member_key
from stepwell.base.plan import PageIds
from stepwell.base.store_key import StoreKey
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
from stepwell.store.keyed_seal import seals_for
from stepwell.store.seal import Verdict

WRITE_BATCH_BYTES = 32 * 2**20  # between two looks at whether the errand was called off
_HEAD = struct.Struct("<4sHHI")  # magic, version, window pages, point pages
_MAGIC, _VERSION = b"SWcp", 1

_OF_READ = {
    ReadOutcome.MISSING: Fate.MISSING,
    ReadOutcome.LENGTH: Fate.LENGTH,
    ReadOutcome.DAMAGED: Fate.DAMAGED,
    ReadOutcome.CANCELLED: Fate.CANCELLED,
    ReadOutcome.FAILED: Fate.FAILED,
}
_UNSETTLED = (ReadOutcome.FAILED, ReadOutcome.LENGTH)  # a store with `late_write_s` may still write into such buffers
_OF_VERDICT = {
    Verdict.INTACT: Fate.OK,
    Verdict.UNREADABLE: Fate.UNREADABLE,
    Verdict.VERSION: Fate.VERSION,
    Verdict.FOREIGN: Fate.FOREIGN,
    Verdict.SWAPPED: Fate.SWAPPED,
    Verdict.LENGTH: Fate.LENGTH,
    Verdict.DAMAGED: Fate.DAMAGED,
    Verdict.OTHER_KEY: Fate.OTHER_KEY,
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

    @property
    def block(self) -> memoryview:
        """All of it, for stores that must know memory before they may use it."""
        ...

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sealed:
    """What a put has to write, parents before children. Its pages must not change until it is written."""

    space: Space
    task: PutPages | PutCheckpoint
    writes: Sequence[Write]
    places: Sequence[int]  # of the writes, among the task's items
    manifest: Write | None = None  # of a checkpoint: only when all else is there


class _Reading(NamedTuple):
    fates: list[Fate]
    digests: list[bytes]  # of what came
    unsettled: bool


class StoreHands:
    """Carries out store tasks for one rank of a model, in that rank's own namespaces."""

    def __init__(self, store: Store, memory: HostPages, *, rank: int = 0, ranks: int = 1, key: StoreKey | None = None) -> None:
        self._store, self._memory = store, memory
        self._shard = f"{rank}/{ranks}"
        self._seals = seals_for(key)
        self._member = struct.Struct(f"<32s{self._seals.digest_bytes}sQ")  # of a manifest: key, digest, length

    def run(self, namespace: Namespace, task: Task, cancelled: Callable[[], bool]) -> Outcome:
        """One task from start to end. Raises what the store raises."""
        if isinstance(task, (PutPages, PutCheckpoint)):
            return self.put(self.seal(namespace, task), cancelled)
        space = self.space(namespace)
        if isinstance(task, Ask):
            found = self._contains(space, [*task.pages, *map(manifest_key, task.boundaries)])
            there, missing = Fate.OK, Fate.MISSING
            return Outcome(fates=tuple([there if each else missing for each in found]))
        if isinstance(task, FetchPages):
            return self._fetch_pages(space, task, cancelled)
        return self._fetch_checkpoint(space, task, cancelled)

    def seal(self, namespace: Namespace, task: PutPages | PutCheckpoint) -> Sealed:
        """What the store lacks, with its stamps. Writes nothing; raises what the store raises."""
        space = self.space(namespace)
        return self._seal_pages(space, task) if isinstance(task, PutPages) else self._seal_checkpoint(space, task)

    def put(self, sealed: Sealed, cancelled: Callable[[], bool]) -> Outcome:
        """Writes what was sealed. Raises what the store raises."""
        return self._put_pages(sealed, cancelled) if sealed.manifest is None else self._put_checkpoint(sealed)

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
        """The part of the store that is this rank's share of a namespace, under its key. Says nothing of its salt."""
        label = namespace.model if namespace.adapter is None else f"{namespace.model} + {namespace.adapter}"
        return Space(
            digest=self._seals.space(replace(namespace, shard=self._shard).digest),
            label=_cut(f"{label} [{self._shard}{self._seals.label}]", MAX_LABEL_BYTES),
            tenant=_cut(namespace.tenant or "", MAX_TENANT_BYTES),
        )

    # ---- upwards ----------------------------------------------------------------------------------

    def _read(self, space: Space, reads: Sequence[Read], cancelled: Callable[[], bool]) -> _Reading:
        """What became of each read. What is damaged is deleted."""
        results = self._store.read_into(space, reads, cancelled=cancelled)
        fates, digests = self._judge(space, reads, results)
        unsettled = False
        if fates.count(Fate.OK) < len(fates):
            bad = [read.key for read, fate in zip(reads, fates, strict=True) if fate.is_damage and fate is not Fate.VERSION]
            if bad:
                self._forget(space, bad)
            unsettled = any(result.outcome in _UNSETTLED for result in results)
        return _Reading(fates=fates, digests=digests, unsettled=unsettled)

    def _judge(self, space: Space, reads: Sequence[Read], results: Sequence[ReadResult]) -> tuple[list[Fate], list[bytes]]:
        """What came of each read, and the digests of what came. Everything that came is verified."""
        found, digest, none = ReadOutcome.FOUND, self._seals.digest, bytes(self._seals.digest_bytes)
        came = [result.outcome is found for result in results]
        digests = [digest(read.into) if here else none for read, here in zip(reads, came, strict=True)]  # nothing else in between
        keys, lengths, fates = [read.key for read in reads], [len(read.into) for read in reads], [Fate.OK] * len(reads)
        expected = self._seals.stamp_all(space, keys, lengths, digests)
        if all(came) and compare_digest(b"".join([result.stamp for result in results]), b"".join(expected)):
            return fates, digests
        for at, (result, stamped, here) in enumerate(zip(results, expected, came, strict=True)):
            if not here:
                fates[at] = _OF_READ[result.outcome]
            elif not compare_digest(result.stamp, stamped):  # why not?
                verdict = self._seals.judge(space, keys[at], result.stamp, length=lengths[at], digest=digests[at])
                fates[at] = _OF_VERDICT[verdict]
        return fates, digests

    def _fetch_pages(self, space: Space, task: FetchPages, cancelled: Callable[[], bool]) -> Outcome:
        buffers = [self._memory.view(Kind.PREFIX, page) for page in task.ids.tolist()]
        read = self._read(space, list(starmap(Read, zip(task.keys, buffers, strict=True))), cancelled)
        moved = sum([len(into) for into, fate in zip(buffers, read.fates, strict=True) if fate is Fate.OK])
        return Outcome(fates=tuple(read.fates), moved_bytes=moved, unsettled=read.unsettled)

    def _fetch_checkpoint(self, space: Space, task: FetchCheckpoint, cancelled: Callable[[], bool]) -> Outcome:
        """The manifest, then every member it names, which must be the very bytes it was written for."""
        buffers = [view for _, view in self._members(task.windows, task.points)]
        name, manifest = manifest_key(task.boundary), memoryview(bytearray(_HEAD.size + len(buffers) * self._member.size))
        (fate,) = self._read(space, [Read(key=name, into=manifest)], cancelled).fates
        if fate is not Fate.OK:
            return Outcome(fates=(fate,))  # into memory that is nobody's page
        named = self._parse(manifest, len(task.windows), len(task.points))
        fate, unsettled = Fate.UNREADABLE, False
        if named is not None:
            reads = [Read(key=key, into=into) for (key, _), into in zip(named, buffers, strict=True)]
            read = self._read(space, reads, cancelled)
            fate, unsettled = _of_members(read, [digest for _, digest in named]), read.unsettled
        if fate.is_damage and fate is not Fate.VERSION:  # another version's values are somebody else's
            self._forget(space, [name])
        moved = sum(map(len, buffers)) if fate is Fate.OK else 0
        return Outcome(fates=(fate,), moved_bytes=moved, unsettled=unsettled)

    # ---- downwards --------------------------------------------------------------------------------

    def _seal_pages(self, space: Space, task: PutPages) -> Sealed:
        wanted = [at for at, there in enumerate(self._contains(space, task.keys)) if not there]
        pages = [self._memory.view(Kind.PREFIX, page) for page in task.ids[wanted].tolist()]
        digests = list(
            map(self._seals.digest, pages)
        )  # nothing else in between: it would have to be fetched from memory again each time
        keys = [task.keys[at] for at in wanted]
        stamps = self._seals.stamp_all(space, keys, list(map(len, pages)), digests)
        before = [task.parent or NO_PARENT, *task.keys]
        parents, depths = [before[at] for at in wanted], [task.first + at for at in wanted]
        writes = list(starmap(Write, zip(keys, pages, stamps, parents, depths, strict=True)))
        return Sealed(space=space, task=task, writes=writes, places=wanted)

    def _put_pages(self, sealed: Sealed, cancelled: Callable[[], bool]) -> Outcome:
        writes, places, moved = sealed.writes, sealed.places, 0
        fates = [Fate.OK] * num_items(sealed.task)
        step = max(WRITE_BATCH_BYTES // max(len(writes[0].data), 1), 1) if writes else 1
        for start in range(0, len(writes), step):
            if cancelled():
                fates[places[start] :] = [Fate.CANCELLED] * (len(fates) - places[start])
                break
            batch = writes[start : start + step]
            outcomes = self._store.write_from(sealed.space, batch)
            moved += _stored_bytes(batch, outcomes)
            for at, outcome in zip(places[start : start + step], outcomes, strict=True):
                fates[at] = _OF_WRITE[outcome]
        return Outcome(fates=tuple(fates), moved_bytes=moved)

    def _seal_checkpoint(self, space: Space, task: PutCheckpoint) -> Sealed:
        name, group = manifest_key(task.boundary), bytes(task.boundary)
        if self._contains(space, [name]) == [True]:
            return Sealed(space=space, task=task, writes=(), places=())
        pages = (*task.window_keys, *[task.boundary] * len(task.points))
        writes, listed, parent = [], [], group
        for depth, (page, (kind, data)) in enumerate(zip(pages, self._members(task.windows, task.points), strict=True)):
            digest = self._seals.digest(data)
            key = member_key(page, kind.label, digest)
            (stamp,) = self._seals.stamp_all(space, [key], [len(data)], [digest])
            writes.append(Write(key=key, data=data, stamp=stamp, parent=parent, depth=task.page + depth, group=group))
            listed.append((key, digest, len(data)))
            parent = key
        content = memoryview(self._manifest(len(task.windows), len(task.points), listed))
        (stamp,) = self._seals.stamp_all(space, [name], [len(content)], [self._seals.digest(content)])
        manifest = Write(key=name, data=content, stamp=stamp, parent=parent, depth=task.page + len(writes), group=group)
        return Sealed(space=space, task=task, writes=writes, places=[0] * len(writes), manifest=manifest)

    def _put_checkpoint(self, sealed: Sealed) -> Outcome:
        """Members first; the manifest only when all of them are there."""
        assert sealed.manifest is not None, "a checkpoint that is there already has nothing to write"
        outcomes = self._store.write_from(sealed.space, sealed.writes)
        fate = next((fate for fate in map(_OF_WRITE.__getitem__, outcomes) if fate is not Fate.OK), Fate.OK)
        if fate is Fate.OK:
            fate = _OF_WRITE[self._store.write_from(sealed.space, [sealed.manifest])[0]]
        return Outcome(fates=(fate,), moved_bytes=_stored_bytes(sealed.writes, outcomes))

    def _members(self, windows: PageIds, points: PageIds) -> Iterator[tuple[Kind, memoryview]]:
        for kind, ids in ((Kind.WINDOW, windows), (Kind.POINT, points)):
            for page in ids.tolist():
                yield kind, self._memory.view(kind, page)

    def _manifest(self, windows: int, points: int, listed: Sequence[tuple[bytes, bytes, int]]) -> bytes:
        return _HEAD.pack(_MAGIC, _VERSION, windows, points) + b"".join(self._member.pack(*member) for member in listed)

    def _parse(self, manifest: memoryview, windows: int, points: int) -> list[tuple[bytes, bytes]] | None:
        """Keys and digests of the members; None unless it is a manifest of exactly this shape."""
        size = _HEAD.size + (windows + points) * self._member.size
        if len(manifest) != size or _HEAD.unpack_from(manifest) != (_MAGIC, _VERSION, windows, points):
            return None
        return [(key, digest) for key, digest, _ in self._member.iter_unpack(manifest[_HEAD.size :])]


def _of_members(read: _Reading, digests: list[bytes]) -> Fate:
    """What a checkpoint comes to, with its members read: each must be the one that the manifest was written for."""
    for fate, came, named in zip(read.fates, read.digests, digests, strict=True):
        if fate is not Fate.OK:
            return Fate.INCOMPLETE if fate is Fate.MISSING else fate
        if came != named:
            return Fate.MIXED
    return Fate.OK


def _stored_bytes(writes: Sequence[Write], outcomes: Sequence[WriteOutcome]) -> int:
    stored = WriteOutcome.STORED
    return sum([len(write.data) for write, outcome in zip(writes, outcomes, strict=True) if outcome is stored])


def _cut(text: str, size: int) -> str:
    """The text without what would not fit into `size` bytes."""
    return text.encode()[:size].decode(errors="ignore")
