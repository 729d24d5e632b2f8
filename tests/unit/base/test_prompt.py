"""Prompts at the door: what is let in, how it is packed and compared. And keys: what would make bytes mean something else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stepwell import BadTokens, ConfigError, Kind, ModelSpec, Namespace, Point, Prefix, StateSpec, Window
from stepwell.base.prompt import KEY_BYTES, MAX_TOKEN, common_pages, pack, page_keys, unpack
from stepwell.base.spec import Part
from toys import HYBRID, KV, SSM, model, swa, text


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 0, MAX_TOKEN],
        (5, 0, MAX_TOKEN),
        np.array([5, 0, MAX_TOKEN], np.int64),
        np.array([5, 0, MAX_TOKEN], np.uint32),
        np.array([5, 0, MAX_TOKEN], ">i4"),
        np.array([5, 9, 0, 9, MAX_TOKEN], np.int32)[::2],
        np.array([[5, 0, MAX_TOKEN]] * 2, np.int32)[0],
    ],
)
def test_pack_and_unpack_are_inverse_for_every_kind_of_array(tokens: object) -> None:
    packed = pack(tokens)  # type: ignore[arg-type]
    assert packed == bytes([5, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 127])
    assert unpack(packed).tolist() == [5, 0, MAX_TOKEN]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_types_are_widened(dtype: type) -> None:
    assert unpack(pack(np.array([0, 1, 127], dtype))).tolist() == [0, 1, 127]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], "token id -1 is out of range"),
        ([2**31], "token id 2147483648 is out of range"),
        ([7, 2**80], "out of range"),
        ([7, 2**63], "out of range"),
        ([-(2**80)], "out of range"),
        ([1, 10**400], "out of range"),
        ([7, 0.5], "whole numbers"),
        ([2**70], "out of range"),
        (np.array([2**63], np.uint64), "out of range"),
        (np.array([2**32 + 1], np.int64), "out of range"),
        (np.array([0xFFFFFF00], ">u4"), "out of range"),
        ([1.0, 2.0], "whole numbers"),
        ([True, False], "whole numbers"),
        (["a"], "whole numbers"),
        ([[1, 2], [3, 4]], "one-dimensional"),
        ([[1, 2], [3]], "sequence of whole numbers"),
        (7, "one-dimensional"),
        (None, "one-dimensional"),
        ([None], "whole numbers"),
    ],
)
def test_pack_refuses_what_is_not_a_row_of_token_ids(tokens: object, says: str) -> None:
    with pytest.raises(BadTokens, match=says):
        pack(tokens)  # type: ignore[arg-type]


def test_the_vocabulary_is_the_limit_when_it_is_known() -> None:
    assert pack([99], vocab_size=100)
    with pytest.raises(BadTokens, match=r"token id 100 is out of range 0\.\.99"):
        pack([3, 100], vocab_size=100)


def test_an_empty_prompt_packs_to_nothing() -> None:
    assert pack([]) == b"" and pack(np.empty(0, np.int32)) == b""


def test_pack_does_not_change_what_it_was_given() -> None:
    tokens = np.array([3, 2, 1], np.int64)
    pack(tokens)
    assert tokens.tolist() == [3, 2, 1] and tokens.dtype == np.int64


@pytest.mark.parametrize("page", [1, 3, 4])
def test_common_pages_counts_whole_pages_only(page: int) -> None:
    random_ = random.Random(page)
    for _ in range(300):
        left = [random_.randrange(2) for _ in range(random_.randrange(14))]
        right = left[: random_.randrange(15)] + [random_.randrange(2) for _ in range(random_.randrange(6))]
        expected = 0
        while (
            left[: (expected + 1) * page] == right[: (expected + 1) * page]
            and min(len(left), len(right)) >= (expected + 1) * page
        ):
            expected += 1
        assert common_pages(pack(left), pack(right), page * 4) == expected


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


def test_rows_in_an_engines_own_order_are_another_layout() -> None:
    """Their sizes are the same, so nothing else distinguishes the two."""
    orders = [None, "", "heads, tokens", "tokens, heads"]
    assert len({replace(HYBRID, row_order=order).fingerprint for order in orders}) == len(orders)
    ranks = replace(HYBRID, row_order="heads, tokens").for_ranks(1)
    assert ranks.row_order == "heads, tokens" and ranks.with_page_tokens(HYBRID.page_tokens * 2).row_order == "heads, tokens"


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


@pytest.mark.parametrize("name", ["model", "layout", "shard", "adapter", "salt", "tenant"])
def test_a_namespace_of_half_a_surrogate_pair_is_refused_without_showing_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the {name} of a namespace has half of a surrogate pair") as refused:
        Namespace(**{"model": "m", "layout": "l", name: "se\ud800cret"})
    assert "cret" not in str(refused.value)
    assert Namespace(**{"model": "m", "layout": "l", name: "\U0001f600"}).digest
