"""One rank's side of the store: moves pages between host memory and a store, sealing and checking every value.

    page         one value under the page's key
    checkpoint   members under names made from their digests, then a manifest that lists those digests

With a key, everything is in spaces of that key and stamped with it. A value that does not verify is a miss; it is deleted, so
that a good copy can replace it. A put has two halves, so that one operation can be sealed while the previous one is being
written: `seal` queries the store and hashes, `put` writes. Runs on worker threads and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress, repeat, starmap
from typing import NamedTuple, Protocol

from stepwell.base.errors import StoreError
from stepwell.base.ids import Kind, Level
from stepwell.base.prompt import Namespace, manifest_key, member_key
from stepwell.base.store_key import StoreKey
from stepwell.base.tasks import (
    FetchCheckpoint,
    FetchPages,
    FindItems,
    ItemStatus,
    Outcome,
    PageIds,
    PutCheckpoint,
    PutPages,
    Relevel,
    Task,
    num_items,
)
from stepwell.store.api import (
    MAX_LABEL_BYTES,
    MAX_TENANT_BYTES,
    NO_PARENT,
    Read,
    Space,
    Store,
    Write,
    WriteOutcome,
    relevel,
)
from stepwell.store.judging import OF_WRITE, UNSETTLED, deletable, judge_reads
from stepwell.store.keyed_seal import seals_for
from stepwell.transfer.manifest import ManifestFormat

WRITE_BATCH_BYTES = 64 * 2**20  # in one call of the store: between calls a cancellation takes effect


class HostPages(Protocol):
    """Host memory by page, as a store worker needs it."""

    @property
    def block(self) -> memoryview:
        """All of it, for stores that require registered memory."""
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
    size_bytes: int
    manifest: Write | None = None  # of a checkpoint: written only after everything else


def goes_with(first: Sealed, put: Sealed, *, before_bytes: int) -> bool:
    """Whether one call of the store can write a put together with a first one and those in between, of `before_bytes` in total:
    all of them pages of the same space, one batch in all.
    """
    alike = put.space == first.space and isinstance(put.task, PutPages) and isinstance(first.task, PutPages)
    return alike and before_bytes + put.size_bytes <= WRITE_BATCH_BYTES


class _Reading(NamedTuple):
    statuses: list[ItemStatus]
    digests: list[bytes]  # of the values read
    unsettled: bool


class StoreWorker:
    """Carries out store tasks for one rank of a model, in that rank's own namespaces."""

    def __init__(self, store: Store, memory: HostPages, *, rank: int = 0, ranks: int = 1, key: StoreKey | None = None) -> None:
        self._store, self._memory = store, memory
        self._shard = f"{rank}/{ranks}"
        self._seals = seals_for(key)
        self._manifests = ManifestFormat(self._seals.digest_bytes)

    def run(self, namespace: Namespace, task: Task, cancelled: Callable[[], bool]) -> Outcome:
        """Runs one task from start to end. Raises the store's exceptions."""
        if isinstance(task, (PutPages, PutCheckpoint)):
            return self.put([self.seal(namespace, task)], cancelled)[0]
        space = self.space(namespace)
        if isinstance(task, FindItems):
            found = self._contains(space, [*task.pages, *map(manifest_key, task.boundaries)])
            there, missing = ItemStatus.OK, ItemStatus.MISSING
            return Outcome(statuses=tuple([there if each else missing for each in found]))
        if isinstance(task, Relevel):
            relevel(self._store, space, [*task.pages, *map(manifest_key, task.boundaries)], task.level)
            return Outcome(statuses=(ItemStatus.OK,))
        if isinstance(task, FetchPages):
            return self._fetch_pages(space, task, cancelled)
        return self._fetch_checkpoint(space, task, cancelled)

    def seal(self, namespace: Namespace, task: PutPages | PutCheckpoint) -> Sealed:
        """The values that the store lacks, with their stamps. Writes nothing; raises the store's exceptions."""
        space = self.space(namespace)
        return self._seal_pages(space, task) if isinstance(task, PutPages) else self._seal_checkpoint(space, task)

    def put(self, group: Sequence[Sealed], cancelled: Callable[[], bool]) -> list[Outcome]:
        """Writes sealed puts: one, or several that go together (`goes_with`), in order. Raises the store's exceptions."""
        if len(group) == 1 and group[0].manifest is not None:
            return [self._put_checkpoint(group[0])]
        outcomes = self._write_pages(group[0].space, [write for sealed in group for write in sealed.writes], cancelled)
        results, start = [], 0
        for sealed in group:
            end = start + len(sealed.writes)
            results.append(_of_pages(sealed, outcomes[start:end]))
            start = end
        return results

    def _contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        found = self._store.contains(space, keys)
        if len(found) != len(keys):
            raise StoreError(f"the store was asked for {len(keys)} keys and answered for {len(found)}")
        return found

    def _write(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """One call of the store. Raises StoreError unless it reports exactly one outcome for each write."""
        outcomes = self._store.write_from(space, writes)
        if len(outcomes) != len(writes):
            raise StoreError(f"the store was given {len(writes)} values and answered for {len(outcomes)}")
        return outcomes

    def _delete_damaged(self, space: Space, keys: list[bytes]) -> None:
        """Deletes useless values. If the store cannot delete them, they stay; they are misses in any case."""
        with suppress(StoreError):
            self._store.delete(space, keys)

    def space(self, namespace: Namespace) -> Space:
        """The part of the store for this rank's share of a namespace, under its key. Its label does not reveal the salt."""
        model = namespace.model if namespace.name in ("", namespace.model) else f"{namespace.name} {_short(namespace.model)}"
        label = model if namespace.adapter is None else f"{model} + {namespace.adapter}"
        return Space(
            digest=self._seals.space(replace(namespace, shard=self._shard).digest),
            label=_cut(f"{label} [{self._shard}{self._seals.label}]", MAX_LABEL_BYTES),
            tenant=_cut(namespace.tenant or "", MAX_TENANT_BYTES),
        )

    # ---- upwards ----------------------------------------------------------------------------------

    def _read(self, space: Space, reads: Sequence[Read], cancelled: Callable[[], bool]) -> _Reading:
        """The result of each read. Damaged values are deleted."""
        results = self._store.read_into(space, reads, cancelled=cancelled)
        statuses, digests = judge_reads(self._seals, space, reads, results)
        unsettled = False
        if statuses.count(ItemStatus.OK) < len(statuses):
            bad = deletable(reads, statuses)
            if bad:
                self._delete_damaged(space, bad)
            unsettled = any(result.outcome in UNSETTLED for result in results)
        return _Reading(statuses=statuses, digests=digests, unsettled=unsettled)

    def _fetch_pages(self, space: Space, task: FetchPages, cancelled: Callable[[], bool]) -> Outcome:
        buffers = [self._memory.view(Kind.PREFIX, page) for page in task.ids.tolist()]
        read = self._read(space, list(starmap(Read, zip(task.keys, buffers, strict=True))), cancelled)
        came = compress(buffers, [status is ItemStatus.OK for status in read.statuses])
        moved = sum(map(len, came))
        return Outcome(statuses=tuple(read.statuses), moved_bytes=moved, unsettled=read.unsettled)

    def _fetch_checkpoint(self, space: Space, task: FetchCheckpoint, cancelled: Callable[[], bool]) -> Outcome:
        """Reads the manifest, then every member it names; each must have exactly the bytes that the manifest was written for."""
        buffers = [view for _, view in self._members(task.windows, task.points)]
        name, manifest = manifest_key(task.boundary), memoryview(bytearray(self._manifests.size(len(buffers))))
        (status,) = self._read(space, [Read(key=name, into=manifest)], cancelled).statuses
        if status is not ItemStatus.OK:
            return Outcome(statuses=(status,))  # the memory belongs to no page
        named = self._manifests.parse(manifest, len(task.windows), len(task.points))
        status, unsettled = ItemStatus.UNREADABLE, False
        if named is not None:
            reads = [Read(key=key, into=into) for (key, _), into in zip(named, buffers, strict=True)]
            read = self._read(space, reads, cancelled)
            status, unsettled = _of_members(read, [digest for _, digest in named]), read.unsettled
        if status.is_damage and status is not ItemStatus.VERSION:  # values of another version belong to another release
            self._delete_damaged(space, [name])
        moved = sum(map(len, buffers)) if status is ItemStatus.OK else 0
        return Outcome(statuses=(status,), moved_bytes=moved, unsettled=unsettled)

    # ---- downwards --------------------------------------------------------------------------------

    def _seal_pages(self, space: Space, task: PutPages) -> Sealed:
        found = self._contains(space, task.keys)
        wanted = [at for at, there in enumerate(found) if not there]
        relevel(self._store, space, [key for key, there in zip(task.keys, found, strict=True) if there], task.level)
        pages = [self._memory.view(Kind.PREFIX, page) for page in task.ids[wanted].tolist()]
        digests = list(map(self._seals.digest, pages))  # with nothing in between: other work would evict it from the CPU's cache
        keys, lengths = [task.keys[at] for at in wanted], list(map(len, pages))
        stamps = self._seals.stamp_all(space, keys, lengths, digests)
        before = [task.parent or NO_PARENT, *task.keys]
        parents, depths = [before[at] for at in wanted], [task.first + at for at in wanted]
        columns = zip(keys, pages, stamps, parents, depths, repeat(b""), repeat(task.level))
        writes = list(starmap(Write, columns))
        return Sealed(space=space, task=task, writes=writes, places=wanted, size_bytes=sum(lengths))

    def _write_pages(self, space: Space, writes: Sequence[Write], cancelled: Callable[[], bool]) -> list[WriteOutcome | None]:
        """The outcome of each write, None for those that were cancelled."""
        outcomes: list[WriteOutcome | None] = []
        step = max(WRITE_BATCH_BYTES // max(len(writes[0].data), 1), 1) if writes else 1
        for start in range(0, len(writes), step):
            if cancelled():
                return outcomes + [None] * (len(writes) - start)
            outcomes += self._write(space, writes[start : start + step])
        return outcomes

    def _seal_checkpoint(self, space: Space, task: PutCheckpoint) -> Sealed:
        name, group = manifest_key(task.boundary), bytes(task.boundary)
        if self._contains(space, [name]) == [True]:
            relevel(self._store, space, [name], task.level)
            return Sealed(space=space, task=task, writes=(), places=(), size_bytes=0)
        pages = (*task.window_keys, *[task.boundary] * len(task.points))
        writes, listed, parent = [], [], group
        for at, (page, (kind, data)) in enumerate(zip(pages, self._members(task.windows, task.points), strict=True)):
            digest = self._seals.digest(data)
            key = member_key(page, kind.label, digest)
            (stamp,) = self._seals.stamp_all(space, [key], [len(data)], [digest])
            depth = task.page + at
            writes.append(Write(key=key, data=data, stamp=stamp, parent=parent, depth=depth, group=group, level=task.level))
            listed.append((key, digest, len(data)))
            parent = key
        content = memoryview(self._manifests.pack(len(task.windows), len(task.points), listed))
        (stamp,) = self._seals.stamp_all(space, [name], [len(content)], [self._seals.digest(content)])
        depth = task.page + len(writes)
        manifest = Write(key=name, data=content, stamp=stamp, parent=parent, depth=depth, group=group, level=task.level)
        size = sum(length for _, _, length in listed)
        return Sealed(space=space, task=task, writes=writes, places=[0] * len(writes), size_bytes=size, manifest=manifest)

    def _put_checkpoint(self, sealed: Sealed) -> Outcome:
        """Members first; the manifest only if all of them are stored."""
        assert sealed.manifest is not None, "a checkpoint that is stored already has nothing to write"
        members = [write.key for write in sealed.writes]
        relevel(self._store, sealed.space, members, sealed.task.level)  # shared members must not be evicted for the new ones
        outcomes = self._write(sealed.space, sealed.writes)
        status = next((status for status in map(OF_WRITE.__getitem__, outcomes) if status is not ItemStatus.OK), ItemStatus.OK)
        if status is ItemStatus.OK:
            status = OF_WRITE[self._write(sealed.space, [sealed.manifest])[0]]
        if status is ItemStatus.OK:  # from now on members have the level of the manifest, and none by themselves
            relevel(self._store, sealed.space, members, Level.EXPENDABLE)
        return Outcome(statuses=(status,), moved_bytes=_stored_bytes(sealed.writes, outcomes))

    def _members(self, windows: PageIds, points: PageIds) -> Iterator[tuple[Kind, memoryview]]:
        for kind, ids in ((Kind.WINDOW, windows), (Kind.POINT, points)):
            for page in ids.tolist():
                yield kind, self._memory.view(kind, page)


def _of_members(read: _Reading, digests: list[bytes]) -> ItemStatus:
    """The status of a checkpoint whose members were read: each must be the one that the manifest was written for."""
    for status, came, named in zip(read.statuses, read.digests, digests, strict=True):
        if status is not ItemStatus.OK:
            return ItemStatus.INCOMPLETE if status is ItemStatus.MISSING else status
        if came != named:
            return ItemStatus.MIXED
    return ItemStatus.OK


def _of_pages(sealed: Sealed, outcomes: Sequence[WriteOutcome | None]) -> Outcome:
    """The outcome of a put of pages. Those stored before are OK; from the first cancelled one on, none is."""
    statuses = [ItemStatus.OK] * num_items(sealed.task)
    if outcomes.count(WriteOutcome.STORED) == len(outcomes):
        return Outcome(statuses=tuple(statuses), moved_bytes=sealed.size_bytes)
    for at, outcome in zip(sealed.places, outcomes, strict=True):
        if outcome is None:
            statuses[at:] = [ItemStatus.CANCELLED] * (len(statuses) - at)
            break
        statuses[at] = OF_WRITE[outcome]
    return Outcome(statuses=tuple(statuses), moved_bytes=_stored_bytes(sealed.writes, outcomes))


def _stored_bytes(writes: Sequence[Write], outcomes: Sequence[WriteOutcome | None]) -> int:
    stored = WriteOutcome.STORED
    return sum([len(write.data) for write, outcome in zip(writes, outcomes, strict=True) if outcome is stored])


def _short(model: str) -> str:
    """The identity of a model's weights with a shortened digest: `fb8926aa/fp32/cpu`."""
    digest, slash, rest = model.partition("/")
    return f"{digest[:8]}{slash}{rest}"


def _cut(text: str, size: int) -> str:
    """The text, truncated to `size` bytes."""
    return text.encode()[:size].decode(errors="ignore")
