"""What the writer does in its turn: keeps a group of values, erases keys, clears spaces. One thread at a time.

Order: nothing enters the index before it is safe on disk, nothing leaves it by an erase before the mark is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from stepwell.base.errors import StoreError
from stepwell.store.api import Space, Write, WriteOutcome
from stepwell.store.log.appending import Appender
from stepwell.store.log.commit import PutRequest
from stepwell.store.log.disk import up_to_block
from stepwell.store.log.drafts import HOLDS_FROM_NOW, Draft, draft_marks, draft_values
from stepwell.store.log.format import ENTRY_BYTES, INLINE_BYTES, Kind, inline_bytes
from stepwell.store.log.reclaim import NO_ROOM_ERRNOS, Reclaim
from stepwell.store.log.recovery import apply
from stepwell.store.log.state import LogState

_EVERYTHING = bytes(32)  # the key of a clear


@dataclass(slots=True, eq=False)
class _Entry:
    """One value of a group: whose it is, and which in there."""

    request: PutRequest
    at: int
    same: _Entry | None = None  # an earlier one of this group with the same key

    @property
    def write(self) -> Write:
        return self.request.writes[self.at]

    @property
    def outcome(self) -> WriteOutcome | None:
        return self.request.outcomes[self.at]

    @outcome.setter
    def outcome(self, outcome: WriteOutcome) -> None:
        self.request.outcomes[self.at] = outcome


class Writer:
    def __init__(self, state: LogState) -> None:
        self._state = state
        self._appender = Appender(state)
        self.reclaim = Reclaim(state, self._appender)
        self.batches_since_snapshot = 0
        self.values_since_snapshot = 0

    def put(self, requests: Sequence[PutRequest]) -> None:
        """Decides every outcome of these requests."""
        entries = [_Entry(request, at) for request in requests for at in range(len(request.writes))]
        for request in requests:
            request.outcomes = [None] * len(request.writes)
        with self._state.lock:
            waiting = self._within_quotas(self._admit(entries))
        while waiting:
            waiting = self._put_some(waiting)
        for entry in entries:
            if entry.same is not None:
                first = entry.same.outcome
                entry.outcome = WriteOutcome.EXISTS if first is WriteOutcome.STORED else first or WriteOutcome.FAILED

    def erase(self, space: Space, keys: Sequence[bytes]) -> int:
        """Forgets values for good; returns how many there were. Raises StoreError when that could not be made to last."""
        state = self._state
        with state.lock:
            known = state.index.rows_of(space.digest)
            ghosts = any(segment.ghosts for segment in state.segments.table.values())
            wanted = [key for key in dict.fromkeys(keys) if ghosts or key in known]  # a ghost would come back without a mark
            there = sum(key in known for key in wanted)
        self._mark(Kind.DELETE, space, wanted)
        state.counters.add("deleted_values", there)
        return there

    def clear(self, space: Space) -> int:
        """Forgets every value of a space for good; returns how many there were. Raises StoreError like `erase`."""
        there = len(self._state.index.rows_of(space.digest))
        self._mark(Kind.CLEAR, space, [_EVERYTHING])
        self._state.counters.add("cleared_values", there)
        return there

    def settle(self) -> None:
        """Revokes what failed, if anything did, so that every batch before the next one is settled. Raises OSError."""
        if self._appender.to_revoke and not self._appender.room:
            self.reclaim.next_segment()  # which may have revoked it already, by carrying something
        if self._appender.to_revoke:
            self._appender.append([])

    # ---- inside -----------------------------------------------------------------------------------

    def _admit(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """The values that are to be written; the others have their outcome. What the new ones stand on counts as used."""
        index, largest = self._state.index, self._state.budget.max_value_bytes
        index.next_tick()
        first: dict[tuple[bytes, bytes], _Entry] = {}
        waiting = []
        for entry in entries:
            write, digest = entry.write, entry.request.space.digest
            if write.key in index.rows_of(digest):
                entry.outcome = WriteOutcome.EXISTS
            elif (digest, write.key) in first:
                entry.same = first[digest, write.key]
            elif len(write.data) > largest:
                entry.outcome = WriteOutcome.TOO_LARGE
            else:
                first[digest, write.key] = entry
                waiting.append(entry)
                index.touch(digest, write.parent)
        return waiting

    def _within_quotas(self, waiting: list[_Entry]) -> list[_Entry]:
        """Tenants with a quota give up their own coldest values for what they write now; what exceeds it alone has no room."""
        state, allowed = self._state, []
        needed = dict.fromkeys(state.quotas, 0)
        if not needed:
            return waiting
        for entry in waiting:
            tenant, size = self._tenant(entry.request.space), _on_disk(entry.write)
            if tenant in needed and needed[tenant] + size > state.quotas[tenant]:
                entry.outcome = WriteOutcome.NO_ROOM
                state.counters.add("over_quota")
                continue
            if tenant in needed:
                needed[tenant] += size
            allowed.append(entry)
        for tenant, size in needed.items():
            self.keep_quota(tenant, size)
        return allowed

    def keep_quota(self, tenant: str, coming: int = 0) -> None:
        """Gives up a tenant's coldest values until it keeps its quota with so many bytes more."""
        state = self._state
        over = state.index.tenant_bytes(tenant) + coming - state.quotas[tenant]
        if over > 0:
            self.reclaim.give_up(state.index.coldest(over, tenant=tenant))

    def _tenant(self, space: Space) -> str:
        known = self._state.index
        return known.spaces[known.number(space)].tenant

    def _put_some(self, waiting: list[_Entry]) -> list[_Entry]:
        """Writes as many values as the active segment has room for, or makes room; returns those still waiting."""
        state = self._state
        try:
            drafts = self._drafts(waiting)
            if not drafts:
                self.reclaim.next_segment()
                return waiting
            self._append(drafts)
        except OSError as error:
            outcome = WriteOutcome.NO_ROOM if error.errno in NO_ROOM_ERRNOS else WriteOutcome.FAILED
            state.counters.add("no_room" if outcome is WriteOutcome.NO_ROOM else "failed_writes", len(waiting))
            for entry in waiting:
                entry.outcome = outcome
            return []
        done = waiting[: sum(len(draft.entries) for draft in drafts)]
        for entry in done:
            entry.outcome = WriteOutcome.STORED
        state.counters.add("written_values", len(done))
        state.counters.add("written_bytes", sum(len(entry.write.data) for entry in done))
        return waiting[len(done) :]

    def _drafts(self, waiting: Sequence[_Entry]) -> list[Draft]:
        """Batches of the first values, as many as fit in the active segment. Earlier values are kept before later ones."""
        room = self._appender.room
        drafts: list[Draft] = []
        for _, entries in groupby(waiting, key=lambda entry: entry.request.space.digest):
            same = list(entries)
            writes = [entry.write for entry in same]
            while writes:
                draft = draft_values(same[0].request.space, writes, room)
                if draft is None:
                    return drafts
                drafts.append(draft)
                room -= draft.total_bytes
                writes = writes[len(draft.entries) :]
        return drafts

    def _mark(self, kind: Kind, space: Space, keys: Sequence[bytes]) -> None:
        """Writes marks that hold from now on, and does what they say."""
        try:
            while keys:
                draft = draft_marks(kind, space, keys, [HOLDS_FROM_NOW] * len(keys), self._appender.room)
                if draft is None:
                    self.reclaim.next_segment()
                    continue
                self._append([draft])
                keys = keys[len(draft.entries) :]
        except OSError as error:
            raise StoreError(f"{self._state.directory} could not make it last: {error}; the values may come back") from error

    def _append(self, drafts: Sequence[Draft]) -> None:
        batches = self._appender.append(drafts)
        with self._state.lock:
            for batch in batches:
                apply(self._state.index, self._state.marks, batch)
        self.batches_since_snapshot += len(batches)
        self.values_since_snapshot += sum(len(batch.entries) for batch in batches)


def _on_disk(write: Write) -> int:
    size = len(write.data)
    return ENTRY_BYTES + (inline_bytes(size) if size <= INLINE_BYTES else up_to_block(size))
