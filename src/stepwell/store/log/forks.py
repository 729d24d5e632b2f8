"""What a forked child does with logs it did not open: it lets go of their locks, so that these end with their owner.

A child inherits the descriptor that holds the lock, and would hold it for as long as it lives. The log itself is no use
to it: see `LogState.must_be_open`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Locked(Protocol):
    def leave_in_child(self) -> None: ...


_owned: WeakSet[Locked] = WeakSet()


def watch(owner: Locked) -> None:
    """From now on, `leave_in_child` is called in every fork of this process, as long as somebody has the owner."""
    _register()
    _owned.add(owner)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for owner in list(_owned):
        owner.leave_in_child()
    _owned.clear()
