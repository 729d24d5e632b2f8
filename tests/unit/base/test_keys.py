"""Page keys: everything that would make bytes mean something else makes another key."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from stepwell import Kind, ModelSpec, Namespace, Point, Prefix, StateSpec, Window
from stepwell.base.keys import KEY_BYTES, page_keys
from stepwell.base.spec import Part
from stepwell.base.tokens import pack
from toys import HYBRID, KV, SSM, model, swa, text

TWO_KV = model(KV, replace(KV, name="index", row_bytes=8))


def _spec(**changes: object) -> ModelSpec:
    kv = replace(KV, **changes)  # type: ignore[arg-type]
    return model(kv, swa(8), SSM)


LAYOUTS = {
    "as it is": HYBRID,
    "dtype": _spec(dtype="bf16"),
    "row width": _spec(row_bytes=8),
    "layers": _spec(layers=1),
    "ratio": _spec(shape=Prefix(ratio=2)),
    "alignment": _spec(align=8),
    "shards": _spec(shards=2),
    "optional": _spec(required=False),
    "name": _spec(name="keys"),
    "page size": HYBRID.with_page_tokens(8),
    "window": model(KV, swa(12), SSM),
    "order": model(swa(8), KV, SSM),
    "one state less": model(KV, swa(8)),
    "period": model(KV, swa(8), replace(SSM, shape=Point(period=6))),
    "one rank of two": _spec(shards=2).for_ranks(2),
}


def test_no_two_layouts_share_a_key() -> None:
    packed, seen = pack(text(1, 64)), {}
    for label, spec in LAYOUTS.items():
        space = Namespace(model="m", layout=spec.fingerprint)
        for key in page_keys(space.digest, packed, spec.page_tokens * 4):
            assert key not in seen, f"{label} and {seen[key]} share a key"
            seen[key] = label


def test_no_two_namespaces_share_a_digest() -> None:
    values = (None, "", "a", "b", "ab", "a\x00", "\x00", "\x01")
    spaces = [
        Namespace(model=model_, layout=layout, shard=shard, adapter=adapter, salt=salt)
        for model_, layout in itertools.product(("", "a", "ab"), repeat=2)
        for shard, adapter, salt in itertools.product(values, repeat=3)
    ]
    assert len({space.digest for space in spaces}) == len(spaces)


@pytest.mark.parametrize("fields", list(itertools.pairwise(("model", "layout", "shard", "adapter", "salt"))))
def test_texts_do_not_run_together(fields: tuple[str, str]) -> None:
    def space(first: str, second: str) -> Namespace:
        return Namespace(**({"model": "m", "layout": "l"} | dict(zip(fields, (first, second), strict=True))))

    assert space("a", "bc").digest != space("ab", "c").digest
    assert space("abc", "").digest != space("", "abc").digest


@pytest.mark.parametrize("field", ["shard", "adapter", "salt"])
def test_absent_is_not_empty(field: str) -> None:
    bare = Namespace(model="m", layout="l")
    assert bare.digest != Namespace(**({"model": "m", "layout": "l"} | {field: ""})).digest


def test_equal_namespaces_have_equal_digests_and_the_key_is_stable() -> None:
    space = Namespace(model="m", layout="l", adapter="x")
    assert space.digest == Namespace(model="m", layout="l", adapter="x").digest
    assert len(space.digest) == KEY_BYTES
    first = next(page_keys(space.digest, pack([1, 2, 3, 4]), 16))
    assert first == next(page_keys(space.digest, pack([1, 2, 3, 4, 5]), 16))


def test_a_key_depends_on_every_token_before_it() -> None:
    space = Namespace(model="m", layout="l").digest
    base = list(page_keys(space, pack(text(1, 16)), 16))
    assert len(set(base)) == 4
    for position in range(16):
        changed = text(1, 16)
        changed[position] += 1
        keys = list(page_keys(space, pack(changed), 16))
        assert keys[: position // 4] == base[: position // 4]
        assert not set(keys[position // 4 :]) & set(base)


def test_only_whole_pages_have_keys() -> None:
    space = Namespace(model="m", layout="l").digest
    assert [len(list(page_keys(space, pack(text(1, n)), 16))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_the_same_tokens_in_pages_of_another_size_have_other_keys() -> None:
    space = Namespace(model="m", layout="l").digest
    packed = pack(text(1, 16))
    assert not set(page_keys(space, packed, 16)) & set(page_keys(space, packed, 32))


def test_fingerprint_ignores_the_models_name_only() -> None:
    assert replace(HYBRID, name="other").fingerprint == HYBRID.fingerprint
    assert len({spec.fingerprint for spec in LAYOUTS.values()}) == len(LAYOUTS)


def _states_reversed(parts: list[Part]) -> list[Part]:
    """The same parts in one object, the last state first."""
    moved, offset = [], 0
    for part in reversed(parts):
        moved.append(replace(part, offset=offset))
        offset += part.size_bytes
    return moved


def _rows_before_layers(parts: list[Part]) -> list[Part]:
    """All layers of a row side by side, in place of all rows of a layer."""
    return [replace(part, row_stride=part.layers * part.row_bytes, layer_stride=part.row_bytes) for part in parts]


@pytest.mark.parametrize("moved", [_states_reversed, _rows_before_layers])
def test_another_order_of_rows_in_a_page_is_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch, moved: Callable[[list[Part]], list[Part]]
) -> None:
    as_it_is, lay_out = replace(TWO_KV, name="before"), ModelSpec._lay_out
    assert as_it_is.parts(Kind.PREFIX) and as_it_is.fingerprint == TWO_KV.fingerprint
    monkeypatch.setattr(ModelSpec, "_lay_out", lambda spec, kind: moved(lay_out(spec, kind)))
    other = replace(TWO_KV, name="after")
    assert other.object_bytes(Kind.PREFIX) == as_it_is.object_bytes(Kind.PREFIX)
    assert other.fingerprint != as_it_is.fingerprint


def test_a_part_says_where_each_row_lies() -> None:
    for spec in LAYOUTS.values():
        for kind in Kind:
            rows = sorted(
                part.offset + layer * part.layer_stride + row * part.row_stride
                for part in spec.parts(kind) for layer in range(part.layers) for row in range(part.rows)
            )  # fmt: skip
            ends = sorted(
                part.offset + layer * part.layer_stride + row * part.row_stride + part.row_bytes
                for part in spec.parts(kind) for layer in range(part.layers) for row in range(part.rows)
            )  # fmt: skip
            assert [*rows, spec.object_bytes(kind)] == [0, *ends], "rows lie back to back, and none over another"


def test_a_window_is_not_a_point_of_the_same_size() -> None:
    as_window = model(KV, StateSpec(name="x", shape=Window(tokens=4), layers=1, row_bytes=8, dtype="u8"))
    as_point = model(KV, StateSpec(name="x", shape=Point(), layers=1, row_bytes=8, dtype="u8"))
    assert as_window.fingerprint != as_point.fingerprint
