"""How a budget is cut: strides, slabs, and what is too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepwell import ConfigError, Kind, ModelSpec, Point, Prefix, Spill, StateSpec, Tier, Window
from stepwell.base.spec.presets import load_spec, preset_names
from stepwell.memory.arena import Arena
from stepwell.memory.layout import ArenaLayout, lay_out, slab_bytes_of
from toys import FULL, HYBRID, KV, model


def test_strides_are_payloads_rounded_up_to_the_alignment() -> None:
    odd = StateSpec(name="odd", shape=Point(), layers=3, row_bytes=11, dtype="u8")
    layout = lay_out(model(KV, odd), budget_bytes=1 << 20, alignment=4096)
    assert layout.strides == {Kind.PREFIX: 4096, Kind.POINT: 4096}
    layout = lay_out(model(KV, odd), budget_bytes=1 << 20, alignment=16)
    assert layout.strides == {Kind.PREFIX: 32, Kind.POINT: 48}


def test_a_model_without_prefix_states_still_has_pages_to_count() -> None:
    pure = ModelSpec(name="mamba", states=(StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=100, dtype="u8"),))
    layout = lay_out(pure, budget_bytes=1 << 16, alignment=64)
    assert layout.strides == {Kind.PREFIX: 64, Kind.POINT: 128}


@pytest.mark.parametrize("budget", [96, 97, 1000, 4096, 10_000, 1 << 20, (1 << 30) + 12_345])
def test_slabs_tile_the_budget_and_stay_inside_it(budget: int) -> None:
    layout = lay_out(HYBRID, budget_bytes=budget, alignment=16)
    assert layout.slab_bytes >= max(layout.strides.values())
    assert layout.slab_bytes * (layout.num_slabs - 1) < budget <= layout.slab_bytes * layout.num_slabs
    for kind, stride in layout.strides.items():
        last_end = 0
        for slab in {0, 1, layout.num_slabs - 2, layout.num_slabs - 1} & set(range(layout.num_slabs)):
            pages = layout.pages_of_slab(slab, kind)
            if len(pages):
                assert pages.start * stride >= slab * layout.slab_bytes
                assert pages.stop * stride <= min((slab + 1) * layout.slab_bytes, budget)
                last_end = max(last_end, pages.stop)
        assert last_end <= layout.rows(kind)


def test_small_arenas_have_small_slabs_that_can_be_traded() -> None:
    layout = lay_out(HYBRID, budget_bytes=64 * 32, alignment=16)
    assert layout.num_slabs >= 16


def test_pages_of_one_kind_have_nobody_to_trade_with_and_waste_nothing() -> None:
    layout = lay_out(FULL, budget_bytes=1000 * 32 + 31, alignment=16)
    assert layout.num_slabs == 1 and layout.pages_of_slabs(Kind.PREFIX) == [1000]


def test_every_page_size_divides_a_slab_when_that_is_possible() -> None:
    third = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=48, dtype="u8")
    layout = lay_out(model(KV, third), budget_bytes=1 << 20, alignment=16)
    assert all(layout.slab_bytes % stride == 0 for stride in layout.strides.values())


@pytest.mark.parametrize(("preset", "kv_dtype", "budget_gb"), [
    ("deepseek-v4-flash", "fp8", 5), ("gemma-3-27b", None, 20), ("qwen3-next-80b", None, 50), ("kimi-k3", None, 100),
    ("gpt-oss-120b", None, 20), ("gpt-oss-120b", None, 2),
])  # fmt: skip
def test_slabs_of_real_models_leave_little_unused(preset: str, kv_dtype: str | None, budget_gb: int) -> None:
    layout = lay_out(load_spec(preset, kv_dtype=kv_dtype), budget_bytes=budget_gb * 10**9, alignment=4096)
    usable = sum(layout.pages_of_slabs(Kind.PREFIX)) * layout.strides[Kind.PREFIX]
    assert usable > 0.995 * layout.size_bytes
    assert len(layout.strides) * layout.slab_bytes < 0.02 * layout.size_bytes


@given(st.lists(st.integers(1, 300), min_size=2, max_size=3), st.integers(2, 400))
@example(strides=[19, 17], factor=2)  # in slabs of 19 the second kind would fit only now and then
@example(strides=[3, 290, 288], factor=12)
def test_an_arena_large_enough_for_two_pages_of_each_kind_can_be_laid_out(strides: list[int], factor: int) -> None:
    by_kind = dict(zip((Kind.PREFIX, Kind.WINDOW, Kind.POINT), strides, strict=False))
    budget = factor * len(strides) * max(strides)
    layout = ArenaLayout(size_bytes=budget, slab_bytes=slab_bytes_of(by_kind, budget), strides=by_kind)
    assert layout.slab_bytes <= budget
    Arena(Tier.DEVICE, layout)  # would refuse one that cannot hold a page of each kind side by side


def test_a_budget_below_one_object_of_each_kind_is_refused_with_the_number() -> None:
    lay_out(HYBRID, budget_bytes=96, alignment=16)
    with pytest.raises(ConfigError, match=r"host_bytes of 95 B .* it must be at least 96 B"):
        lay_out(HYBRID, budget_bytes=95, alignment=16)
    with pytest.raises(ConfigError, match="cannot hold one page of each kind for 'toy'"):
        lay_out(FULL, budget_bytes=31, alignment=16)


def test_window_pages_are_cut_to_divide_the_page() -> None:
    spec = ModelSpec(
        name="w", page_tokens=8, states=(StateSpec(name="s", shape=Window(tokens=3), layers=1, row_bytes=8, dtype="u8"),)
    )
    assert lay_out(spec, budget_bytes=4096, alignment=1).strides[Kind.WINDOW] == 2 * 8


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("name", preset_names())
def test_a_spill_splits_pages_on_the_device_and_nowhere_else(name: str, tier: Tier) -> None:
    spec = load_spec(name)
    plain = lay_out(spec, budget_bytes=20 * 10**9, alignment=4096, tier=tier)
    assert Kind.ROWS not in plain.strides
    if len(spec.of_shape(Prefix)) < len(spec.states):
        return
    first = spec.states[0]
    groups = tuple(range(first.layers))
    spilling = replace(spec, spill=Spill(states=(first.name,), group_of={first.name: groups}))
    layout = lay_out(spilling, budget_bytes=20 * 10**9, alignment=4096, tier=tier)
    if tier is Tier.HOST:
        assert layout == plain
        return
    assert layout.strides == {
        Kind.PREFIX: -(-spilling.device_bytes(Kind.PREFIX) // 4096) * 4096,
        Kind.ROWS: -(-spilling.device_bytes(Kind.ROWS) // 4096) * 4096,
    }
    usable = sum(layout.pages_of_slabs(Kind.ROWS)) * layout.strides[Kind.ROWS]
    assert usable > 0.99 * layout.size_bytes
