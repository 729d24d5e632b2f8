"""One writer at a time, many callers per sync: whoever finds nobody writing writes for everyone who waits.

    caller 1   put ---- writes 1 ---- done
    caller 2       put ...wait... writes 2, 3, 4 ---- done
    caller 3         put ...wait................ done
    caller 4           put ...wait.............. done

Knows no files and no formats: a turn is a function over a group of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition

from stepwell.store.api import Space, Write, WriteOutcome

GROUP_BYTES = 64 << 20  # of values in one group: what a caller may have to wait for


@dataclass(slots=True, kw_only=True, eq=False)
class PutRequest:
    space: Space
    writes: Sequence[Write]
    outcomes: list[WriteOutcome | None] = field(default_factory=list)
    size_bytes: int = 0
    done: bool = False
    error: BaseException | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ExclusiveTask:
    """Anything else that only the writer may do, alone."""

    run: Callable[[], None]
    done: bool = False
    error: BaseException | None = None


class GroupCommit:
    """Hands out the turn to write."""

    def __init__(self, put: Callable[[Sequence[PutRequest]], None]) -> None:
        self._put = put
        self._changed = Condition()
        self._queue: deque[PutRequest | ExclusiveTask] = deque()
        self._taken = False

    def submit(self, request: PutRequest | ExclusiveTask) -> None:
        """Returns when the request was served, here or by another thread; raises what its turn raised."""
        with self._changed:
            self._queue.append(request)
        while True:
            with self._changed:
                while self._taken and not request.done:
                    self._changed.wait()
                if request.done:
                    break
                self._taken = True
                group = self._next_group()
            self._serve(group)
        if request.error is not None:
            raise request.error

    def _next_group(self) -> list[PutRequest | ExclusiveTask]:
        """All puts at the head of the queue, up to a limit; or the one job there."""
        group = [self._queue.popleft()]
        size = group[0].size_bytes if isinstance(group[0], PutRequest) else GROUP_BYTES
        while self._queue and isinstance(head := self._queue[0], PutRequest) and size + head.size_bytes <= GROUP_BYTES:
            size += head.size_bytes
            group.append(self._queue.popleft())
        return group

    def _serve(self, group: Sequence[PutRequest | ExclusiveTask]) -> None:
        error = self._try(group)
        if isinstance(error, Exception) and len(group) > 1:  # each alone, so that it comes to whoever caused it only
            for request in group:
                request.error = self._try([request])
        else:
            for request in group:
                request.error = error
        with self._changed:
            self._taken = False
            for request in group:
                request.done = True
            self._changed.notify_all()

    def _try(self, group: Sequence[PutRequest | ExclusiveTask]) -> BaseException | None:
        try:
            puts = [request for request in group if isinstance(request, PutRequest)]
            if puts:
                self._put(puts)
            for request in group:
                if isinstance(request, ExclusiveTask):
                    request.run()
        except BaseException as raised:  # it belongs to whoever waits for it
            return raised
        return None
