"""Runs an engine on a thread of its own, for servers: requests go in from any thread, and answers come back through callbacks.

Everything that touches the engine or its cache runs on that thread; `call` brings it there. What goes wrong in a pass ends the
requests of that pass, with the reason, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from stepwell.base.errors import StepwellError
from stepwell.engine.engine import IDLE_S, Engine
from stepwell.engine.request import Ask, Delta

log = logging.getLogger(__name__)

T = TypeVar("T")
OnDelta = Callable[[Delta], None]

UPKEEP_S = 0.02  # between steps without requests: backups still go on


class EngineLoop:
    """One thread around one engine. `start` it, and `stop` it; all other methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[int, OnDelta] = {}
        self._thread = Thread(target=self._run, name="stepwell-engine", daemon=True)
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all requests, keeps what is to be kept, and closes the engine."""
        self._inbox.put(self._finish)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Runs `work` between two passes. Its result or exception is the future's."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self._engine))
            except BaseException as error:  # it belongs to whoever asked
                future.set_exception(error)

        if not self.alive:
            future.set_exception(StepwellError("the engine has stopped"))
        else:
            self._inbox.put(run)
        return future

    def submit(self, ask: Ask, on_delta: OnDelta) -> Future[int]:
        """Queues a request. `on_delta` is called on the engine's thread, quickly to return, until one has `finish`."""

        def work(engine: Engine) -> int:
            number = engine.submit(ask)
            self._listeners[number] = on_delta
            return number

        return self.call(work)

    def abort(self, number: int) -> None:
        self._inbox.put(lambda: self._engine.abort(number))

    # ---- inside -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._take_calls()
            if self._stopped:
                return
            self._step()

    def _take_calls(self) -> None:
        """What was asked since the last pass; waits a little where a pass would do nothing."""
        wait_s = (IDLE_S if self._engine.num_open else UPKEEP_S) if self._engine.idle else 0
        try:
            if wait_s:
                self._inbox.get(timeout=wait_s)()
            while True:  # also those that came with the last one: each is answered
                self._inbox.get_nowait()()
        except Empty:
            pass

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:  # the worker boundary: the requests of this pass end with it, the others go on
            log.exception("a pass failed")
            deltas = self._engine.fail_active(f"{type(error).__name__}: {error}")
        for delta in deltas:
            listener = self._listeners.get(delta.request)
            if delta.finish is not None:
                self._listeners.pop(delta.request, None)
            if listener is not None:
                self._tell(listener, delta)

    @staticmethod
    def _tell(listener: OnDelta, delta: Delta) -> None:
        try:
            listener(delta)
        except Exception:  # a listener that has gone away is no reason to stop
            log.debug("nobody listens to request %d any more", delta.request, exc_info=True)

    def _finish(self) -> None:
        self._stopped = True
        for number in list(self._listeners):
            self._engine.abort(number)
        self._step()
        self._engine.close()
