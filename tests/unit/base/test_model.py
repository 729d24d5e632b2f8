"""Arithmetic on a spec: boundaries, windows, parts and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import Kind, ModelSpec, Point, Prefix, SpecError, StateSpec, Window
from stepwell.base.spec import Cut
from toys import FULL, HYBRID, KV, SSM, model, swa


@pytest.mark.parametrize("page", [1, 4, 6, 8])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 12, 100])
def test_window_span_covers_the_window_and_no_page_before_it(page: int, window: int) -> None:
    spec = model(KV, swa(window), page_tokens=page)
    size = spec.window_page_tokens
    assert page % size == 0 and size <= window
    for boundary in range(0, 8 * page, page):
        span = spec.window_span(boundary)
        needed = set(range(max(boundary - window, 0), boundary))
        covered = {token for at in span for token in range(at * size, (at + 1) * size)}
        assert needed <= covered and span.stop * size == boundary
        assert not span or set(range(span.start * size, (span.start + 1) * size)) & needed, "the first page is not needed"


def test_window_page_is_the_largest_divisor_that_fits_the_window() -> None:
    assert [model(KV, swa(w), page_tokens=12).window_page_tokens for w in (1, 2, 5, 6, 11, 12, 50)] == [1, 2, 4, 6, 6, 12, 12]


def test_a_model_without_windows_has_no_span() -> None:
    assert list(FULL.window_span(64)) == [] and FULL.window_tokens == 0


def test_several_windows_share_pages_as_long_as_the_longest() -> None:
    spec = model(KV, swa(3), replace(swa(8), name="wide"))
    assert spec.window_tokens == 8 and [part.state for part in spec.parts(Kind.WINDOW)] == ["swa", "wide"]


@pytest.mark.parametrize(("align", "step"), [(1, 4), (2, 4), (6, 12), (8, 8), (10, 20)])
def test_legal_boundaries_are_multiples_of_page_and_alignment(align: int, step: int) -> None:
    spec = model(KV, replace(SSM, align=align))
    assert spec.boundary_step == step
    for tokens in range(60):
        assert spec.is_legal(tokens) == (tokens % 4 == 0 and tokens % align == 0)
        assert spec.floor(tokens) == max(each for each in range(tokens + 1) if spec.is_legal(each))
    assert not spec.is_legal(-step)


@pytest.mark.parametrize("tokens", range(1, 20))
def test_usable_leaves_at_least_one_token_to_compute(tokens: int) -> None:
    usable = HYBRID.usable(tokens)
    assert usable < tokens <= usable + 4 and HYBRID.is_legal(usable)


def test_usable_of_nothing_is_nothing() -> None:
    assert HYBRID.usable(0) == 0


def test_needed_at_names_each_state_that_has_bytes_there() -> None:
    tail = StateSpec(name="tail", shape=Point(period=8), layers=1, row_bytes=4, dtype="u8")
    spec = model(KV, swa(8), SSM, tail)
    assert spec.needed_at(0) == ()
    assert [state.name for state in spec.needed_at(4)] == ["kv", "swa", "ssm", "tail"]
    assert [state.name for state in spec.needed_at(8)] == ["kv", "swa", "ssm"]


def test_point_with_a_period_that_divides_the_page_needs_no_checkpoint() -> None:
    spec = model(KV, StateSpec(name="tail", shape=Point(period=4), layers=1, row_bytes=4, dtype="u8"))
    assert not spec.needs_checkpoint and spec.parts(Kind.POINT) == ()
    assert model(KV, StateSpec(name="tail", shape=Point(period=8), layers=1, row_bytes=4, dtype="u8")).needs_checkpoint


def test_parts_lie_back_to_back_in_the_order_of_the_states() -> None:
    states = (
        StateSpec(name="a", shape=Prefix(), layers=2, row_bytes=5, dtype="u8"),
        swa(8),
        StateSpec(name="b", shape=Prefix(ratio=4), layers=3, row_bytes=7, dtype="u8"),
        StateSpec(name="c", shape=Prefix(ratio=8), layers=1, row_bytes=9, dtype="u8"),
    )
    parts = model(*states).parts(Kind.PREFIX)
    assert [(p.state, p.offset, p.layers, p.rows, p.row_bytes) for p in parts] == [
        ("a", 0, 2, 4, 5),
        ("b", 40, 3, 1, 7),
        ("c", 61, 1, 1, 9),
    ]
    assert all(p.size_bytes == p.layers * p.rows * p.row_bytes for p in parts)
    assert model(*states).object_bytes(Kind.PREFIX) == 40 + 21 + 9
    assert model(*states).object_bytes(Kind.POINT) == 0


def test_checkpoint_bytes_follow_the_boundary() -> None:
    assert HYBRID.checkpoint_bytes() == 8 * 8 + 32
    assert HYBRID.checkpoint_bytes(4) == 4 * 8 + 32
    assert HYBRID.checkpoint_bytes(400) == 8 * 8 + 32
    assert HYBRID.bytes_per_token == 8


def test_for_ranks_cuts_sharded_states_and_repeats_the_others() -> None:
    heads = StateSpec(name="heads", shape=Prefix(), layers=1, row_bytes=32, dtype="u8", shards=4)
    latent = StateSpec(name="latent", shape=Prefix(), layers=1, row_bytes=10, dtype="u8")
    spec = model(heads, latent)
    assert [s.row_bytes for s in spec.for_ranks(2).states] == [16, 10]
    assert [s.row_bytes for s in spec.for_ranks(4).states] == [8, 10]
    assert [s.row_bytes for s in spec.for_ranks(8).states] == [8, 10]  # two ranks keep the same head
    assert spec.for_ranks(1) == spec
    assert latent.replicated and not heads.replicated


def test_spans_say_which_bytes_of_a_row_each_rank_keeps() -> None:
    heads = replace(KV, row_bytes=32, shards=4)
    assert [heads.spans_of(rank, 2) for rank in range(2)] == [[range(16)], [range(16, 32)]]
    assert [heads.spans_of(rank, 8) for rank in (0, 1, 7)] == [[range(8)], [range(8)], [range(24, 32)]]
    assert KV.spans_of(1, 2) == [range(KV.row_bytes)], "replicated"


CONV = replace(SSM, name="conv", row_bytes=2 * 12, cuts=(Cut(num_bytes=8, units=4), Cut(num_bytes=4, units=1)))


def test_parts_of_a_row_are_cut_each_in_its_own_way() -> None:
    """Two columns of four heads, two bytes each, and of one group, four bytes: every rank keeps the group."""
    assert CONV.spans_of(0, 2) == [range(0, 4), range(8, 16), range(20, 24)]
    assert CONV.spans_of(1, 2) == [range(4, 12), range(16, 24)]
    share = model(KV, CONV).for_ranks(2).state("conv")
    assert share.row_bytes == 16 and share.cuts == (Cut(num_bytes=4, units=2), Cut(num_bytes=4, units=1))
    assert not CONV.replicated and CONV.for_ranks(2).for_ranks(2) == CONV.for_ranks(4)
    with pytest.raises(
        SpecError, match=r"3 ranks cannot share the 4 parts of state 'conv' equally; .* use 1, 2, 4 or a multiple"
    ):
        model(KV, CONV).for_ranks(3)


def test_how_rows_are_cut_is_no_part_of_the_fingerprint() -> None:
    assert model(KV, CONV).fingerprint == model(KV, replace(CONV, cuts=())).fingerprint


@pytest.mark.parametrize("ranks", [0, -1, 3, 6])
def test_for_ranks_refuses_unequal_shares(ranks: int) -> None:
    with pytest.raises(SpecError):
        model(replace(KV, row_bytes=32, shards=4)).for_ranks(ranks)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ModelSpec(name="x", states=()), "no states"),
        (lambda: model(KV, KV), "names a state twice"),
        (lambda: model(KV, page_tokens=0), "page_tokens must be at least 1"),
        (lambda: model(replace(KV, shape=Prefix(ratio=6)), page_tokens=4), "page_tokens 4 does not fit model 'toy'"),
        (lambda: replace(KV, layers=0), "at least one layer"),
        (lambda: replace(KV, row_bytes=0), "one byte per row"),
        (lambda: replace(KV, align=0), "align and shards"),
        (lambda: replace(KV, shards=3), "equal shards"),
        (lambda: replace(CONV, row_bytes=30), "are not made of"),
        (lambda: replace(CONV, cuts=(Cut(num_bytes=8, units=3),)), "are not made of"),
        (lambda: Prefix(ratio=0), "ratio"),
        (lambda: Window(tokens=0), "tokens"),
        (lambda: Point(period=1), "period"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(make: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make()  # type: ignore[operator]


def test_boundaries_where_no_state_has_bytes_need_no_checkpoint() -> None:
    buffer = StateSpec(name="buffer", shape=Point(period=128), layers=1, row_bytes=8, dtype="u8")
    compressed = ModelSpec(name="toy", states=(KV, buffer), page_tokens=64)
    assert compressed.free_step == 128 and compressed.needs_checkpoint
    assert [compressed.needs_checkpoint_at(at) for at in (0, 64, 128, 192, 256)] == [False, True, False, True, False]
    assert ModelSpec(name="toy", states=(KV, buffer), page_tokens=128).free_step == 128
    assert ModelSpec(name="toy", states=(KV,), page_tokens=64).free_step == 64
    point = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=8, dtype="u8")
    assert ModelSpec(name="toy", states=(KV, buffer, point), page_tokens=64).free_step is None
