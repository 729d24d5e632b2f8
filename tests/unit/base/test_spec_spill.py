"""What a spill changes on the device, and that it changes nothing anywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import Kind, ModelSpec, Prefix, SpecError, Spill, StateSpec
from stepwell.base.ids import CACHED_KINDS
from stepwell.base.spec.presets import load_spec, preset_names
from stepwell.base.spec.spill import HEADER, SLOT
from toys import KV, SSM, model, swa

INDEX = StateSpec(name="index", shape=Prefix(), layers=2, row_bytes=3, dtype="u8")
SPILL = Spill(states=("kv",), group_of={"kv": (0, 1)})
SPEC = replace(model(KV, INDEX), spill=SPILL)


def spilling(spec: ModelSpec) -> ModelSpec:
    """The first state of a model spills, every layer by itself."""
    first = spec.states[0]
    return replace(spec, spill=Spill(states=(first.name,), group_of={first.name: tuple(range(first.layers))}))


PURE = [name for name in preset_names() if len(load_spec(name).of_shape(Prefix)) == len(load_spec(name).states)]


@pytest.mark.parametrize("name", preset_names())
def test_without_a_spill_the_device_holds_what_is_cached(name: str) -> None:
    spec = load_spec(name)
    for kind in Kind:
        assert spec.device_parts(kind) == spec.parts(kind)
        assert spec.device_bytes(kind) == spec.object_bytes(kind)
        assert spec.cached_span(kind) == (0, spec.object_bytes(kind))
    assert spec.parts(Kind.ROWS) == ()


@pytest.mark.parametrize("name", PURE)
def test_a_spill_changes_neither_the_fingerprint_nor_what_is_cached(name: str) -> None:
    spec = load_spec(name)
    assert spilling(spec).fingerprint == spec.fingerprint
    for kind in Kind:
        assert spilling(spec).parts(kind) == spec.parts(kind)


@pytest.mark.parametrize("name", PURE)
def test_two_device_objects_hold_every_cached_byte_once_in_order(name: str) -> None:
    spec = spilling(load_spec(name))
    rows, prefix = spec.cached_span(Kind.ROWS), spec.cached_span(Kind.PREFIX)
    assert rows[0] == 0 and rows[1] == prefix[0] and prefix[1] == spec.object_bytes(Kind.PREFIX)
    cached = {part.state: part for part in spec.parts(Kind.PREFIX)}
    seen = []
    for kind, (start, end) in ((Kind.ROWS, rows), (Kind.PREFIX, prefix)):
        for part in spec.device_parts(kind):
            if part.state in cached:
                assert replace(part, offset=part.offset + start) == cached[part.state]
                assert part.offset + start + part.size_bytes <= end
                seen.append(part.state)
    assert seen == [part.state for part in spec.parts(Kind.PREFIX)]


def test_the_devices_own_parts_lie_behind_the_cached_ones_at_whole_words() -> None:
    *others, slot, header = SPEC.device_parts(Kind.PREFIX)
    assert [part.state for part in others] == ["index"] and (slot.state, header.state) == (SLOT, HEADER)
    assert others[0].offset == 0 and others[0].size_bytes == 2 * 4 * 3
    assert (slot.offset, slot.layers, slot.rows, slot.row_bytes) == (24, 2, 4, 4)
    assert (header.offset, header.size_bytes) == (24 + 2 * 4 * 4, 12)
    assert SPEC.device_bytes(Kind.PREFIX) == 24 + 32 + 12 and SPEC.device_bytes(Kind.ROWS) == 2 * 4 * 4
    odd = replace(model(KV, replace(INDEX, layers=1, row_bytes=5), page_tokens=2), spill=SPILL)
    assert odd.device_parts(Kind.PREFIX)[1].offset == 12, "10 bytes of keys, and the next word"


def test_layers_that_follow_one_selection_share_a_group() -> None:
    spec = replace(SPEC, spill=Spill(states=("kv",), group_of={"kv": (0, 0)}))
    assert next(part for part in spec.device_parts(Kind.PREFIX) if part.state == SLOT).layers == 1


def test_ranks_keep_the_spill() -> None:
    shared = replace(model(replace(KV, shards=2), INDEX), spill=SPILL).for_ranks(2)
    assert shared.spill == SPILL and shared.cached_span(Kind.ROWS) == (0, 16)


@pytest.mark.parametrize(("states", "spill", "message"), [
    ((KV, INDEX, SSM), SPILL, "not Prefix"),
    ((KV, INDEX, swa(8)), SPILL, "not Prefix"),
    ((INDEX, KV), SPILL, "first states"),
    ((replace(KV, required=False), INDEX), SPILL, "first states"),
    ((replace(KV, shape=Prefix(ratio=2)), INDEX), SPILL, "first states"),
    ((replace(KV, layers=3), INDEX), SPILL, "a group for each layer"),
    ((KV, replace(INDEX, name="slot")), SPILL, "for itself"),
])  # fmt: skip
def test_what_cannot_spill_is_refused(states: tuple[StateSpec, ...], spill: Spill, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(model(*states), spill=spill)


def test_groups_without_layers_are_refused() -> None:
    with pytest.raises(SpecError, match="without gaps"):
        Spill(states=("kv",), group_of={"kv": (0, 2)})
    with pytest.raises(SpecError, match="names states"):
        Spill(states=("kv",), group_of={})


def test_values_in_stores_are_found_as_before_rows_could_spill() -> None:
    assert load_spec("deepseek-v3.2").fingerprint == "f6bf854a4b8460372f23cf490f305903"
    assert load_spec("glm-5.2").fingerprint == "9431e8be6d55af5cc382dad5cf0685a2"


def test_kinds_of_hosts_and_stores_are_as_ever() -> None:
    assert [kind.label for kind in CACHED_KINDS] == ["prefix", "window", "point"]
