"""Notices that a cache is called from a second thread, and refuses: nothing inside it is locked."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock, current_thread, local
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import ref

from stepwell.base.errors import WrongThread

P = ParamSpec("P")
R = TypeVar("R")


class _Mark:
    """One thread's own object. It dies with the thread, whoever made that; numbers of threads are used again."""

    __slots__ = ("__weakref__", "name")

    def __init__(self) -> None:
        self.name = current_thread().name


class _Here(local):
    def __init__(self) -> None:
        self.mark = _Mark()


_here = _Here()


class Owner:
    """The thread something belongs to: the first that uses it, until it hands it over or ends."""

    def __init__(self) -> None:
        self._mark: ref[_Mark] | None = None
        self._lock = Lock()

    def check(self, verb: str) -> None:
        """Raises WrongThread unless the calling thread is the owner, or becomes it."""
        mine, mark = _here.mark, self._mark
        if mark is not None and mark() is mine:
            return
        with self._lock:
            theirs = self._mark() if self._mark is not None else None
            if theirs is not None:
                raise WrongThread(
                    f"{verb}() was called from thread {mine.name!r}, but the cache belongs to {theirs.name!r}: "
                    "call it from one thread, or have that one call hand_over() first"
                )
            self._mark = ref(mine)

    def release(self) -> None:
        """The next thread that comes has it. Called by the owner."""
        self.check("hand_over")
        self._mark = None


class Owned(Protocol):
    _owner: Owner


S = TypeVar("S", bound=Owned)


def one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that only the owner may call."""
    verb = method.__qualname__

    @wraps(method)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._owner.check(verb)
        return method(self, *args, **kwargs)

    return checked
