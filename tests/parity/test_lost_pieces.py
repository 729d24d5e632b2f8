"""Each single piece of what a model remembers, lost or damaged in the store: a miss, and never a wrong answer.

A prefix page holds the rows of all prefix states, a window page those of all window states, a point those of all point states. So
damage is done to the bytes of one state at a time, and what is lost is a whole object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from engine.families import FAMILIES
from parity.recorded import PAGE, Played, Recorded, distance, script
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.ids import Kind
from stepwell.base.prompt import TOKEN_BYTES, pack, page_keys
from stepwell.base.spec import Part
from stepwell.store.memory import MemoryStore, _Name, _Value

pytest.importorskip("transformers")

TOLERANCE = 1e-4
Values = dict[_Name, _Value]
WAIT = StoreConfig(
    prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0
)  # fetching is always worth it


@dataclass
class Stored:
    """An engine whose store has seen a script, and the last prompt of it: long, and resumed when nothing is lost."""

    recorded: Recorded
    store: MemoryStore
    whole: Values
    pages: set[bytes]  # keys of prefix pages
    last: Played


@pytest.fixture(scope="module", params=FAMILIES)
def stored(request: pytest.FixtureRequest) -> Stored:
    recorded = Recorded(str(request.param), store="memory:", store_config=WAIT)
    played = script(recorded, seed=5)
    recorded.forget_memory()
    store = recorded.engine.stores[0]
    assert isinstance(store, MemoryStore)
    whole = dict(store._values)
    longest = max(played, key=lambda each: len(each.prompt))
    last = recorded.play(longest.prompt)
    assert last.stored == last.resumed > 0, "nothing to lose"
    cache = recorded.engine.cache
    paths = [pack([*each.prompt, *each.tokens]) for each in played]
    pages = {key for path in paths for key in page_keys(cache.namespace.digest, path, PAGE * TOKEN_BYTES)}
    return Stored(recorded, store, whole, pages, last)


def pieces(stored: Stored) -> list[tuple[Kind, Part]]:
    spec = stored.recorded.engine.cache.spec
    return [(kind, part) for kind in Kind for part in spec.parts(kind) if spec.state(part.state).required]


def names_of(stored: Stored, kind: Kind) -> list[_Name]:
    """Prefix pages by their keys; the members of checkpoints are distinguished by their sizes."""
    spec = stored.recorded.engine.cache.spec
    window, point = spec.object_bytes(Kind.WINDOW), spec.object_bytes(Kind.POINT)
    assert not point or window != point
    found = [name for name, value in stored.whole.items() if len(value.data) == spec.object_bytes(kind)]
    return [name for name in found if (name[1] in stored.pages) == (kind is Kind.PREFIX)]


def play_without(stored: Stored, kind: Kind, change: Callable[[_Value], _Value | None]) -> Played:
    """The last prompt again, from a store in which all objects of a kind were changed, or are gone."""
    stored.recorded.forget_memory()
    values = dict(stored.whole)
    names = names_of(stored, kind)
    assert names, f"the store has no {kind.label} pages"
    for name in names:
        changed = change(values.pop(name))
        if changed is not None:
            values[name] = changed
    stored.store._values = values
    return stored.recorded.play(stored.last.prompt)


def test_a_damaged_piece_is_a_miss(stored: Stored) -> None:
    for kind, part in pieces(stored):

        def damage(value: _Value, at: int = part.offset + part.size_bytes // 2) -> _Value:
            return replace(value, data=value.data[:at] + bytes([value.data[at] ^ 0x40]) + value.data[at + 1 :])

        now = play_without(stored, kind, damage)
        assert now.resumed < stored.last.resumed, f"{part.state} was not missed"
        assert now.tokens == stored.last.tokens and distance(now, stored.last) <= TOLERANCE, f"wrong without {part.state}"


def test_a_lost_object_is_a_miss(stored: Stored) -> None:
    for kind in dict.fromkeys(kind for kind, _ in pieces(stored)):
        now = play_without(stored, kind, lambda value: None)
        assert now.resumed < stored.last.resumed, f"a lost {kind.label} was not missed"
        assert now.tokens == stored.last.tokens and distance(now, stored.last) <= TOLERANCE
