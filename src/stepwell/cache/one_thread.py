"""Notices that a cache is called from a second thread, and refuses: nothing inside it is locked."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Thread, current_thread, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from stepwell.base.errors import WrongThread

P = ParamSpec("P")
R = TypeVar("R")


class Owner:
    """The thread something belongs to: the first that uses it, until it hands it over or ends."""

    def __init__(self) -> None:
        self._ident = 0
        self._thread: Thread | None = None

    def check(self, verb: str) -> None:
        """Raises WrongThread unless the calling thread is the owner, or becomes it."""
        if get_ident() == self._ident:
            return
        thread = self._thread
        if thread is not None and thread.is_alive():
            raise WrongThread(
                f"{verb}() was called from thread {current_thread().name!r}, but the cache belongs to {thread.name!r}: "
                "call it from one thread, or have that one call hand_over() first"
            )
        self._ident, self._thread = get_ident(), current_thread()

    def release(self) -> None:
        self._ident, self._thread = 0, None


class Owned(Protocol):
    _owner: Owner


S = TypeVar("S", bound=Owned)


def one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that only the owner may call."""
    verb = method.__name__

    @wraps(method)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if get_ident() != self._owner._ident:  # spares a call where it is the owner's, as it nearly always is
            self._owner.check(verb)
        return method(self, *args, **kwargs)

    return checked
