"""A process that read for us and cannot be ended may still write: then its pages are said to have failed, not to be free."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stepwell.store.api import Read, ReadOutcome, Space
from stepwell.store.peer.engine_process import FAILED
from stepwell.store.peer.lane import Entry, Lane, LaneLost, SharedHost, Unfenced
from stepwell.store.peer.listing import Listing, Value
from stepwell.store.peer.store import PeerStore
from stepwell.store.seal import seal

SPACE, KEY, PAGE = Space(digest=bytes(32)), b"k" * 32, 4096
ENGINE_S = 30.0 + 60.0  # Mooncake's own limits, for a transfer and for first contact


class Process:
    """Says that a batch failed, and goes when it is killed, or does not."""

    pid = 1

    def __init__(self, *, goes: bool) -> None:
        self._goes = goes
        self.kills = 0

    def say(self, packet: bytes) -> None:
        pass

    def hear(self, limit_s: float) -> bytes:
        return FAILED

    def kill(self) -> bool:
        self.kills += 1
        return self._goes


def lane_over(process: Process) -> Lane:
    lane = Lane.__new__(Lane)
    lane._process = process  # type: ignore[assignment]
    return lane


@pytest.mark.parametrize(("goes", "error"), [(True, LaneLost), (False, Unfenced)])
def test_a_lane_says_whether_its_process_is_gone(goes: bool, error: type[Exception]) -> None:
    process, entries = Process(goes=goes), [(0, 0, PAGE)]
    with pytest.raises(error):
        lane_over(process).read("there", entries, stall_s=1.0)
    assert process.kills == 1


@pytest.mark.parametrize(("error", "outcome"), [(LaneLost, ReadOutcome.CANCELLED), (Unfenced, ReadOutcome.FAILED)])
def test_pages_are_free_at_once_only_where_nothing_can_be_written_late(error: type[Exception], outcome: ReadOutcome) -> None:
    class Broken(Lane):
        def __init__(self) -> None:
            pass

        def read(self, session: str, entries: Sequence[Entry], *, stall_s: float) -> None:
            raise error("as it is played")

    host = SharedHost()
    memory = host.make(PAGE).view
    store = PeerStore(host, Broken)
    store.register([memory])
    value = Value(KEY, seal(SPACE, KEY, memory), 0, PAGE)
    store.add("a", "one", Listing(space=SPACE.digest, session="there", values=[value]))
    (result,) = store.read_into(SPACE, [Read(KEY, memory)])
    assert result.outcome is outcome
    assert store.traits.late_write_s > ENGINE_S, "what the cache keeps failed pages out of use for (fault/test_late_writes.py)"
