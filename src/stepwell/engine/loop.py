"""Runs an engine on a thread of its own, for servers: any thread submits requests, and callbacks deliver the answers.

Everything that touches the engine or its cache runs on that thread; `call` runs a function there. An error in a pass ends only
the requests of that pass, with the reason. Every caller gets an answer, even after the engine has stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol, TypeVar

from stepwell.base.errors import StepwellError
from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
OnDelta = Callable[[Delta], None]
AfterStep = Callable[[Sequence[Delta]], None]

MAX_FAILED_PASSES = 5  # in a row, after which the engine counts as broken
_STOPPED = "the engine has stopped"


class _Call(Protocol):
    def __call__(self, *, refused: str | None = None) -> None:
        """Runs the call, or fails it with the reason `refused`. Raises only errors that end the engine."""
        ...


class EngineLoop:
    """One thread around one engine. `start` it, and `stop` it; all other methods may be called from any thread."""

    def __init__(self, engine: Engine, *, after_step: AfterStep = lambda deltas: None) -> None:
        """`after_step` is called on the engine's thread after each successful step, and must return quickly."""
        self._engine = engine
        self._after_step = after_step
        self._inbox: SimpleQueue[_Call] = SimpleQueue()
        self._listeners: dict[int, OnDelta] = {}
        self._thread = Thread(target=self._run, name="stepwell-engine", daemon=True)
        self._lock = Lock()  # held while `_open` is checked and acted on
        self._open = True
        self._num_arriving = 0
        self._stopping = False
        self._failed_passes = 0  # since the last successful one

    def start(self) -> None:
        """From now on the engine belongs to this loop's thread."""
        self._engine.cache.hand_over()
        self._thread.start()

    def stop(self) -> None:
        """Ends all requests, writes the rest to the store, and closes the engine."""
        self._stopping = True
        self._engine.wake()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def lost(self) -> str | None:
        """Which rank was lost, and why, while no pass can run."""
        return self._engine.lost

    @property
    def gone(self) -> bool:
        """Whether nothing will ever be computed again."""
        return self._engine.gone

    @property
    def num_arriving(self) -> int:
        """The number of submitted requests that the engine has not taken yet."""
        return self._num_arriving

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Runs `work` between two passes. The future gets its result or exception."""
        future: Future[T] = Future()

        def run(*, refused: str | None = None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if refused is not None:
                    raise StepwellError(refused)
                future.set_result(work(self._engine))
            except BaseException as error:  # it belongs to the caller
                future.set_exception(error)

        if not self._given(run):
            run(refused=_STOPPED)
        return future

    def submit(self, request: GenerateRequest, on_delta: OnDelta) -> Future[int]:
        """Queues a request. `on_delta` is called on the engine's thread until a delta has `finish`, and must return quickly."""

        def work(engine: Engine) -> int:
            number = engine.submit(request)
            self._listeners[number] = on_delta
            return number

        with self._lock:
            self._num_arriving += 1
        submitted = self.call(work)
        submitted.add_done_callback(self._arrived)
        return submitted

    def abort(self, number: int) -> None:
        """Ends a request soon; unknown or ended ones are ignored."""

        def run(*, refused: str | None = None) -> None:
            if refused is None:
                self._engine.abort(number)  # only the loop would notice an error

        self._given(run)

    def abort_all(self) -> None:
        """Ends all requests soon."""

        def work(engine: Engine) -> None:
            for number in list(self._listeners):
                engine.abort(number)

        self.call(work)

    # ---- inside -----------------------------------------------------------------------------------

    def _given(self, call: _Call) -> bool:
        """Queues a call; false if the engine's thread will not take it."""
        with self._lock:
            if not self._open:
                return False
            self._inbox.put(call)
        self._engine.wake()
        return True

    def _arrived(self, submitted: Future[int]) -> None:
        with self._lock:
            self._num_arriving -= 1

    def _run(self) -> None:
        reason = _STOPPED
        try:
            while not self._stopping:
                self._take_calls()
                self._step()
            for number in list(self._listeners):
                self._engine.abort(number)
            self._step()
            self._engine.close()
        except BaseException as error:  # the engine is broken: all callers get the reason
            log.exception("the engine has failed")
            reason = f"the engine has failed: {type(error).__name__}: {error}"
        finally:
            self._refuse_all(reason)

    def _take_calls(self) -> None:
        """Runs the calls queued since the last pass. Rests first if a pass would do nothing."""
        self._engine.rest()
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception:  # the worker boundary: the requests of this pass have ended, the others continue
            log.exception("a pass failed")
            self._failed_passes += 1
            if self._failed_passes >= MAX_FAILED_PASSES:
                raise  # the cause is not the requests
            return
        self._failed_passes = 0
        for delta in deltas:
            listener = self._listeners.get(delta.request)
            if delta.finish is not None:
                self._listeners.pop(delta.request, None)
            if listener is not None:
                self._notify(listener, delta)
        self._after_step(deltas)

    def _refuse_all(self, reason: str) -> None:
        with self._lock:
            self._open = False
        try:
            while True:
                self._inbox.get_nowait()(refused=_STOPPED)  # the same answer that later callers get
        except Empty:
            pass
        for number, listener in self._listeners.items():
            self._notify(listener, Delta(request=number, finish=Finish.FAILED, error=reason))
        self._listeners.clear()

    @staticmethod
    def _notify(listener: OnDelta, delta: Delta) -> None:
        try:
            listener(delta)
        except Exception:  # a closed listener is no reason to stop
            log.debug("the listener of request %d failed", delta.request, exc_info=True)
