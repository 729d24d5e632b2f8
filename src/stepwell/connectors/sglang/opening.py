"""Opens the store of one rank, for either adapter to SGLang. Imports nothing of SGLang."""

from __future__ import annotations

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.store_key import StoreKey
from stepwell.connectors.sglang.ranks import Ranks
from stepwell.connectors.sglang.settings import Settings, location
from stepwell.connectors.sglang.weights import NO_WEIGHTS
from stepwell.store.key_file import read_store_key
from stepwell.store.registry import open_store
from stepwell.verified.store import VerifiedStore


def open_verified(settings: Settings, ranks: Ranks, identity: str | None) -> VerifiedStore:
    """`identity` is of the weights, None where nothing says it. Raises ConfigError or StoreError, saying what to do."""
    key: StoreKey | None = read_store_key(settings.key_file) if settings.key_file else None
    where = location(settings, ranks)
    try:
        opened = open_store(where, options=settings.options)
    except StoreError as error:
        hint = f'; where several processes serve, use "store": "shared-{settings.store}"' if where.startswith("log:") else ""
        raise StoreError(f"{error}{hint}") from error
    store = VerifiedStore(opened, key=key, deadline_s=settings.deadline_s, readers=settings.readers)
    if identity is None and store.traits.outlives_process:
        store.close()
        raise ConfigError(NO_WEIGHTS)
    return store
