"""Knees, the next gigabyte and sessions, on curves and traces whose answers are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small_traces import BLOCK, ListTrace, request, setup

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import ManualClock
from stepwell.sim.case import Case, Part
from stepwell.sim.files import write_trace
from stepwell.sim.hardware import Hardware
from stepwell.sim.plan import GIB, Bend, Plan, knee, speed_up
from stepwell.sim.plan_page import draw_plans, short_seconds
from stepwell.sim.plan_sessions import session_bytes, sessions_of
from stepwell.sim.plan_sweep import sweep
from stepwell.sim.replay import replay_trace
from stepwell.sim.report import Report
from stepwell.sim.trace import TraceRequest
from toys import FULL, FULL_POINT, HYBRID, OBJECT_BYTES

SIZES = (1, 2, 4, 8, 16)


# ---- knees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 4, 8])
def test_the_knee_of_a_curve_that_stops_rising_is_where_it_stops(at: int) -> None:
    found = knee(SIZES, [min(size, at) / at for size in SIZES], least_gain=0.01)
    assert (found.bend, found.size_bytes) == (Bend.KNEE, at)


@pytest.mark.parametrize(
    ("values", "bend"),
    [
        ([size / 16 for size in SIZES], Bend.RISING),  # straight
        ([size**2 for size in SIZES], Bend.RISING),  # steeper and steeper
        ([0.5, 0.5, 0.501, 0.502, 0.503], Bend.FLAT),
        ([0.9, 0.8, 0.7, 0.6, 0.5], Bend.FLAT),  # what does harm can be left unused
    ],
)
def test_curves_without_a_knee_say_so(values: list[float], bend: Bend) -> None:
    assert knee(SIZES, values, least_gain=0.005).bend is bend


def test_one_point_is_flat() -> None:
    assert knee([7], [0.3], least_gain=0.0).bend is Bend.FLAT


# ---- the next gigabyte ----------------------------------------------------------------------------


def rounds_of(num_paths: int, *, rounds: int, pages: int) -> list[TraceRequest]:
    """The same prompts again and again, in turn: memory for fewer than all of them is of no use to LRU."""
    each = [range(at * 1000, at * 1000 + pages) for at in range(num_paths)]
    return [request(float(at), blocks) for at, blocks in enumerate(each * rounds)]


def planned(
    requests: Sequence[TraceRequest], pages: dict[Tier, int], *, prices: dict[Tier, float] | None = None, name: str = "t"
) -> Plan:
    """A plan around sizes in pages, replayed here."""

    def replayed(sizes: dict[Tier, int]) -> Report:
        store = sizes.get(Tier.STORE)
        using = setup(
            device_pages=sizes[Tier.DEVICE],
            host_pages=sizes.get(Tier.HOST),
            store_bytes=None if store is None else store * OBJECT_BYTES,
            hardware=Hardware(prefill_tokens_per_s=10, prefill_half_tokens=1e9, host_bytes_per_s=1e6, store_bytes_per_s=1e5),
        )
        return replay_trace(ListTrace(requests=requests, name=name), using, policy="lru", clock=ManualClock())

    curves = {tier: [replayed({**pages, tier: size * factor // 2}) for factor in (1, 2, 4, 8)] for tier, size in pages.items()}
    sessions = sessions_of(requests, FULL, block_tokens=BLOCK)
    return Plan(base=replayed(pages), curves=curves, sessions=sessions, prices=prices or {})


def test_where_only_the_host_helps_the_next_gigabyte_is_the_hosts() -> None:
    # 12 prompts of 8 pages take 96: a host of 64 has none of them when they come again, one of 128 has all.
    # The device is not grown enough to hold them.
    plan = planned(rounds_of(12, rounds=6, pages=8), {Tier.DEVICE: 16, Tier.HOST: 64})
    assert plan.next_tier() is Tier.HOST
    steps = {step.tier: step for step in plan.steps()}
    assert steps[Tier.HOST].added_bytes == 64 * OBJECT_BYTES
    assert steps[Tier.HOST].saved_s > 0.5 * plan.base.prefill_s
    assert steps[Tier.DEVICE].saved_s <= 0.001 * plan.base.prefill_s
    assert plan.steps()[0].tier is Tier.HOST
    assert plan.knees(Tier.HOST)["hit_rate"].size_bytes == 128 * OBJECT_BYTES
    assert plan.knees(Tier.DEVICE)["hit_rate"].bend is Bend.FLAT


def test_where_everything_fits_no_tier_is_worth_growing() -> None:
    plan = planned(rounds_of(4, rounds=4, pages=8), {Tier.DEVICE: 256, Tier.HOST: 256})
    assert plan.next_tier() is None
    assert plan.as_json()["next_gigabyte"]["tier"] is None  # type: ignore[index]


def test_prices_turn_the_choice() -> None:
    requests = rounds_of(12, rounds=6, pages=8)
    pages = {Tier.DEVICE: 64, Tier.HOST: 64}  # either, doubled, holds all of them
    assert planned(requests, pages, prices={Tier.DEVICE: 100.0, Tier.HOST: 1.0}).next_tier() is Tier.HOST
    assert planned(requests, pages, prices={Tier.DEVICE: 1.0, Tier.HOST: 100.0}).next_tier() is Tier.DEVICE


def test_steps_are_seconds_per_gib_and_per_price() -> None:
    plan = planned(rounds_of(12, rounds=6, pages=8), {Tier.DEVICE: 16, Tier.HOST: 64}, prices={Tier.DEVICE: 8.0, Tier.HOST: 2.0})
    host = plan.steps()[0]
    assert host.per_gib_s == pytest.approx(host.saved_s / (64 * OBJECT_BYTES / GIB))
    assert host.per_money_s == pytest.approx(host.per_gib_s / 2)


def test_the_speed_up_counts_computing_loading_and_fetching() -> None:
    hardware = Hardware(
        prefill_tokens_per_s=10, prefill_half_tokens=1e30, request_latency_s=1, host_bytes_per_s=OBJECT_BYTES, host_latency_s=0.5
    )
    first, other = request(0, [1, 2]), request(1, range(10, 17))
    trace = ListTrace(requests=[first, other, replace(first, at_s=2.0)])
    report = replay_trace(trace, setup(device_pages=8, host_pages=64, hardware=hardware), policy="p", clock=ManualClock())
    # 9 and 29 tokens computed; then two pages loaded and one token computed. Without a cache: 9, 29 and 9 tokens.
    assert report.prefill_s == pytest.approx(0.9 + 2.9 + (0.5 + 2 + 0.1))
    assert report.uncached_prefill_s == pytest.approx(0.9 + 2.9 + 0.9)
    assert speed_up(report) == pytest.approx(4.7 / 6.4)


# ---- which sizes ----------------------------------------------------------------------------------


def case_of(**changes: object) -> Case:
    sizes = {Tier.DEVICE: 8 * GIB, Tier.HOST: 16 * GIB, Tier.STORE: 64 * GIB}
    settings = {"trace": Path("t"), "spec": "qwen3-8b", "sizes": sizes, "policy": "lru", "hardware": Hardware()} | changes
    return Case(**settings)  # type: ignore[arg-type]


def test_each_tier_is_swept_around_the_sizes_given_and_nothing_is_replayed_twice() -> None:
    found = sweep(case_of())
    assert len(found.cases) == 13 == len({tuple(sorted(case.sizes.items())) for case in found.cases})
    for tier, places in found.curves.items():
        sizes = [found.cases[at].sizes for at in places]
        base = found.base.sizes[tier]
        assert [each[tier] for each in sizes] == [base // 4, base // 2, base, 2 * base, 4 * base]
        assert all(each[other] == found.base.sizes[other] for each in sizes for other in found.curves if other is not tier)


def test_a_tier_that_is_not_there_is_not_swept() -> None:
    assert set(sweep(case_of(sizes={Tier.DEVICE: 8 * GIB})).curves) == {Tier.DEVICE}


def test_sizes_that_hold_no_page_are_left_out_below_and_refused_as_given() -> None:
    page_bytes = case_of().setup().spec.object_bytes(Kind.PREFIX)
    found = sweep(case_of(sizes={Tier.DEVICE: 3 * page_bytes}))
    assert found.too_small == {Tier.DEVICE: (3 * page_bytes // 4,)}
    assert len(found.curves[Tier.DEVICE]) == 4
    with pytest.raises(ConfigError, match="cannot hold one page"):
        sweep(case_of(sizes={Tier.DEVICE: page_bytes // 2}))
    with pytest.raises(ConfigError, match="store_budget of 0 B cannot hold one page"):
        sweep(case_of(sizes={Tier.DEVICE: GIB, Tier.HOST: GIB, Tier.STORE: 0}))


def test_sizes_that_hold_a_page_of_each_kind_but_not_side_by_side_are_left_out_too() -> None:
    spec = case_of(spec="qwen3-next-80b").setup().spec
    least = sum(spec.object_bytes(kind) for kind in Kind)
    found = sweep(case_of(spec="qwen3-next-80b", sizes={Tier.DEVICE: 4 * least}))
    assert found.too_small == {Tier.DEVICE: (least,)}


def test_the_beginning_of_a_trace_is_its_first_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [request(float(at), [at]) for at in range(5)], block_tokens=BLOCK, source="test")
    assert [each.at_s for each in case_of(trace=path, requests=2).open_trace()] == [0.0, 1.0]
    assert len(list(case_of(trace=path, requests=99).open_trace())) == 5
    assert Part(case_of(trace=path).open_trace(), 1, None).name == "t.jsonl"
    with pytest.raises(ConfigError, match="`requests` must be"):
        case_of(requests=0)


# ---- sessions -------------------------------------------------------------------------------------


def test_a_session_is_its_longest_prompt_and_one_checkpoint() -> None:
    point, page = FULL_POINT.object_bytes(Kind.POINT), FULL_POINT.object_bytes(Kind.PREFIX)
    assert session_bytes(FULL_POINT, 3 * BLOCK + 1) == 3 * page + point
    assert session_bytes(FULL, 3 * BLOCK + 1) == 3 * page
    assert session_bytes(HYBRID, 3 * BLOCK + 1) == 3 * page + point + 2 * HYBRID.object_bytes(Kind.WINDOW)
    assert session_bytes(FULL_POINT, 1) == 0, "nothing could resume there"


def test_sessions_are_counted_by_name() -> None:
    lengths = {"a": (1, 4, 2), "b": (2,), "c": (9, 10)}
    requests = [replace(request(0, range(n)), session=name) for name, counts in lengths.items() for n in counts]
    found = sessions_of(requests, FULL, block_tokens=BLOCK)
    assert (found.sessions, found.requests, found.named) == (3, 6, True)
    assert (found.median_tokens, found.p95_tokens) == (4 * BLOCK + 1, 10 * BLOCK + 1)
    assert found.fitting(Tier.DEVICE, 20 * OBJECT_BYTES) == (5, 2)


def test_without_names_a_session_is_a_prompt_that_no_other_goes_on_from() -> None:
    requests = [request(0, [1, 2]), request(1, [1, 2, 3]), request(2, [1, 2, 4]), request(3, [1, 2, 4]), request(4, [])]
    found = sessions_of(requests, FULL, block_tokens=BLOCK)
    assert (found.sessions, found.named) == (3, False)


# ---- the page -------------------------------------------------------------------------------------


def test_the_page_escapes_names_and_stays_on_its_paper() -> None:
    plan = planned(rounds_of(12, rounds=3, pages=8), {Tier.DEVICE: 16, Tier.HOST: 64}, name="<script>alert(1)</script>")
    html = draw_plans([plan])
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "http" not in html.replace("http-equiv", ""), "nothing is loaded from anywhere"
    lines = re.findall(r'<polyline points="([^"]+)"[^>]*stroke-dasharray="([^"]+)"', html)
    assert len(lines) == 4 and len({dash for _, dash in lines}) == 2, "two tiers, two charts; tiers differ by dash"
    for points, _ in lines:
        places = [tuple(map(float, each.split(","))) for each in points.split()]
        assert places == sorted(places, key=lambda place: place[0]), "sizes grow to the right"
        assert all(60 <= x <= 880 and 40 <= y <= 290 for x, y in places)
    assert f"endless memory: {plan.base.ceiling:.1%}" in html
    assert 'class="knee"' in html


def test_a_better_hit_rate_is_drawn_higher() -> None:
    plan = planned(rounds_of(12, rounds=6, pages=8), {Tier.DEVICE: 16, Tier.HOST: 64})
    html = draw_plans([plan])
    host = re.findall(r'<polyline points="([^"]+)"', html)[1]
    heights = [float(each.split(",")[1]) for each in host.split()]
    assert heights[0] == heights[1] > heights[2] == heights[3]


def test_the_page_says_the_sizes_given_and_what_they_save() -> None:
    plan = planned(rounds_of(12, rounds=3, pages=8), {Tier.DEVICE: 16, Tier.HOST: 64})
    html = draw_plans([replace(plan, base=replace(plan.base, hardware=Hardware()))])
    assert f"{short_seconds(plan.base.prefill_s)} for all requests together" in html
    assert f"in place of {short_seconds(plan.base.uncached_prefill_s)} without a cache" in html
    assert "20,000 tokens/s" in html and "50 GB/s" in html and "e+" not in html, "figures as people write them"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 s"), (-1e-9, "0 s"), (0.000244, "0.000244 s"), (-0.0523, "-0.0523 s"), (36.583, "36.6 s"), (12345.6, "12,346 s")],
)
def test_a_small_saving_is_told_and_none_is_not_a_loss(seconds: float, said: str) -> None:
    assert short_seconds(seconds) == said
