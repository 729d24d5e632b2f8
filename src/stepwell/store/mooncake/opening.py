"""A Mooncake store from a name: `mooncake:/etc/mooncake.json`, or `mooncake:` with options, or both (options take precedence)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from stepwell.base.errors import ConfigError
from stepwell.store.api import Store
from stepwell.store.mooncake.client import connect
from stepwell.store.mooncake.config import FIELDS, MooncakeConfig, from_file, from_mapping
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.store.registry import Opening

CONFIG_PATH = "config_path"


def open_mooncake(opening: Opening) -> Store:
    """Joins the cluster, or raises ConfigError or StoreError and holds nothing."""
    config = config_of(opening)
    join = partial(connect, config)
    return MooncakeStore(join, staging_bytes=config.staging_bytes, clock=opening.clock)


def config_of(opening: Opening) -> MooncakeConfig:
    """Options are the fields of MooncakeConfig, and `config_path` for the file in place of the location."""
    opening.take(*FIELDS, CONFIG_PATH)
    options = dict(opening.options)
    path = options.pop(CONFIG_PATH, "")
    if path and opening.location:
        raise ConfigError(f"two Mooncake configurations, {opening.location} and {path}: give one of them")
    if path or opening.location:
        return from_file(Path(path or opening.location), overrides=options)
    return from_mapping(options, origin="the options of store mooncake:")
