"""Attaches and detaches stores while the server runs.

Opening and closing may take long and happen on a thread; the cache changes its store on the engine's thread. A store is closed
only after the cache has reported that it no longer uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from stepwell.base.config import StoreConfig
from stepwell.base.errors import ConfigError, StepwellError
from stepwell.engine.engine import Engine
from stepwell.engine.loop import EngineLoop
from stepwell.server.access.tenants import Principals
from stepwell.store.api import Store, register
from stepwell.store.registry import open_store


@dataclass(kw_only=True, eq=False)
class _Attached:
    where: str
    store: Store
    closed: Future[None]


class Stores:
    """`start` it once the loop runs, and `close` it before the loop stops. Any thread."""

    def __init__(self, loop: EngineLoop, config: StoreConfig, where: str | None, principals: Principals) -> None:
        """`where` names the store that the engine opened itself. Stores opened here get the tenants' quotas."""
        self._principals = principals
        self._loop = loop
        self._config = config
        self._first = where
        self._now: _Attached | None = None  # changed on the engine's thread only, like the next two
        self._detaching: list[_Attached] = []
        self._closing: dict[str, Future[None]] = {}  # by name, of stores the cache has released
        self._ending = False
        self._host_memory: tuple[memoryview, ...] = ()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="stepwell-stores")

    def start(self) -> None:
        def adopt(engine: Engine) -> None:
            engine.on_detached = lambda store: self._detached(engine, store)
            self._host_memory = engine.cache.store.host_memory
            for store in engine.stores:
                self._now = _Attached(where=self._first or store.traits.name, store=store, closed=Future())

        self._loop.call(adopt).result()

    @property
    def where(self) -> str | None:
        """The store that is attached, by name."""
        now = self._now
        return now.where if now is not None else None

    def attach(self, where: str, options: Mapping[str, str]) -> Future[None]:
        """Opens a store and attaches it. The future raises ConfigError or StoreError, and then holds nothing."""
        return self._threads.submit(self._attach, where, dict(options))

    def detach(self) -> Future[Future[None]]:
        """Detaches the store, or raises ConfigError. The inner future completes when the store is closed."""
        return self._loop.call(self._detach)

    def close(self) -> None:
        """Waits for stores that are being opened or closed. The engine closes stores in use."""

        def leave(engine: Engine) -> None:
            self._ending = True

        with suppress(StepwellError):  # the engine's thread has died
            self._loop.call(leave).result()
        self._threads.shutdown(wait=True)

    # ---- inside -----------------------------------------------------------------------------------

    def _attach(self, where: str, options: Mapping[str, str]) -> None:
        if self._now is not None:
            raise ConfigError("a store is attached already; detach it first")
        try:
            store = open_store(where, options=self._principals.with_quotas(where, options))
        except StepwellError as error:
            closing = self._closing.get(where)
            if any(each.where == where for each in self._detaching) or (closing is not None and not closing.done()):
                raise ConfigError(f"{where} was detached and is still being closed; attach it in a moment") from error
            raise
        try:
            register(store, self._host_memory)  # here, because it may take long
            self._loop.call(lambda engine: self._attach_now(engine, where, store)).result()
        except BaseException:
            store.close()
            raise

    def _attach_now(self, engine: Engine, where: str, store: Store) -> None:
        engine.cache.store.attach(store, self._config)
        engine.stores.append(store)
        self._now = _Attached(where=where, store=store, closed=Future())

    def _detach(self, engine: Engine) -> Future[None]:
        engine.cache.store.detach()
        assert self._now is not None, "the cache has a store that was not attached here"
        detaching = self._now
        self._detaching.append(detaching)
        self._now = None
        return detaching.closed

    def _detached(self, engine: Engine, store: Store) -> None:
        """The cache has released a store. On the engine's thread: must not block."""
        detaching = next(each for each in self._detaching if each.store is store)
        self._closing = {name: each for name, each in self._closing.items() if not each.done()} | {
            detaching.where: detaching.closed
        }
        self._detaching.remove(detaching)
        engine.stores.remove(store)
        if self._ending:
            _close(detaching)
        else:
            self._threads.submit(_close, detaching)


def _close(detaching: _Attached) -> None:
    try:
        detaching.store.close()
    except Exception as error:  # the worker boundary: the error goes to the future
        detaching.closed.set_exception(error)
    else:
        detaching.closed.set_result(None)
