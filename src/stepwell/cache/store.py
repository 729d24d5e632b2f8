"""`cache.store`: a store comes and goes below the host tier while the cache runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from stepwell.base.config import StoreConfig
from stepwell.jobs.executors import StoreExecutor
from stepwell.policy.store_use import StoreTuning
from stepwell.store.api import Store
from stepwell.store_tier.link import LinkState
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers.state import Owner, one_thread
from stepwell.transfer.store_worker import HostPages


class StoreControl:
    """Attaches and detaches stores, and says how the one that is attached does. The cache's thread."""

    _called: ClassVar[str] = "Cache.store"

    def __init__(self, store_tier: StoreTier, owner: Owner) -> None:
        self._tier = store_tier
        self._owner = owner

    @property
    def state(self) -> LinkState:
        """Whether a store is attached, and whether it is in use."""
        return self._tier.link_state

    @property
    def host_memory(self) -> tuple[memoryview, ...]:
        """The host tier's memory, of every rank: what `attach` shows to a store that registers memory."""
        return self._tier.host_memory

    @property
    def host_pages(self) -> Sequence[HostPages]:
        """The same by page."""
        return self._tier.host_pages

    @property
    def resumable_after_s(self) -> float | None:
        """After a kill, what was acknowledged longer ago than this can be resumed from the store. None: what is only in memory
        may be lost, however old it is.
        """
        return self._tier.resumable_after_s

    @one_thread
    def attach(
        self, store: Store, config: StoreConfig | None = None, *, executor: StoreExecutor | None = None,
        tuning: StoreTuning | None = None,
    ) -> None:  # fmt: skip
        """Puts a store below the host tier, at any moment. What is on the host already is offered to it.

        The caller opened the store and closes it, after `detach` or once the cache is closed. Raises ConfigError, and StoreError
        when the store wants to know the host's memory and cannot have it, or is still unregistering it since it was detached.
        Registering may take long with a network card, and takes no time where another thread did it before
        (`store.api.register(store, cache.store.host_memory)`). `tuning` is for tests.
        """
        self._tier.attach(store, config or StoreConfig(), executor, tuning or StoreTuning())

    @one_thread
    def detach(self) -> None:
        """Takes the store away, at any moment. Requests go on with what has arrived or is on its way; what waits to be backed up
        still is, as far as memory holds it until its turn comes. `Cache.step` reports the store as detached when nothing uses it
        any more. Raises ConfigError.
        """
        self._tier.detach()
