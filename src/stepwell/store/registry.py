"""Stores by name: `log:DIR`, `shared-log:DIR`, `memory:`, `mooncake:FILE`, and those that other packages offer.

Another package adds one with an entry point in the group `stepwell.stores`: a name, and a function that takes an Opening
and returns a Store. A store's module is imported when the store is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock, SystemClock
from stepwell.store.api import Store

GROUP = "stepwell.stores"
_OWN = {
    "log": "stepwell.store.log.opening:open_log",
    "shared-log": "stepwell.store.shared.opening:open_shared_log",
    "memory": "stepwell.store.registry:open_memory",
    "mooncake": "stepwell.store.mooncake.opening:open_mooncake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a store is opened with: the text after its name, and options by name."""

    location: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)

    def take(self, *known: str) -> list[str | None]:
        """The values of the given options, None for absent ones. Raises ConfigError for unknown options."""
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise ConfigError(f"unknown store option(s) {', '.join(unknown)}; known: {', '.join(known) or 'none'}")
        return [self.options.get(name) for name in known]


Opener = Callable[[Opening], Store]


def names() -> list[str]:
    """Every store that can be opened by name, built-in ones first."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=GROUP)} - set(_OWN))]


def open_store(where: str, *, options: Mapping[str, str] | None = None, clock: Clock | None = None) -> Store:
    """Opens the store that `where` names, as in `log:/var/cache/stepwell`. Raises ConfigError, or what the store raises."""
    opening = Opening(location=where.partition(":")[2], options=options or {}, clock=clock or SystemClock())
    return find_opener(where)(opening)


def find_opener(where: str) -> Opener:
    """The opener of the store that `where` names. Raises ConfigError if there is none. Opens nothing."""
    name = where.partition(":")[0]
    if name in _OWN:
        module, _, function = _OWN[name].partition(":")
        return cast(Opener, getattr(import_module(module), function))
    for point in entry_points(group=GROUP):
        if point.name == name:
            return cast(Opener, point.load())
    raise ConfigError(f"no store is called {name!r}; there are {', '.join(names())}")


def open_memory(opening: Opening) -> Store:
    from stepwell.base.units import parse_bytes
    from stepwell.store.memory import MemoryStore

    (budget,) = opening.take("budget")
    return MemoryStore(parse_bytes(budget) if budget is not None else None)
