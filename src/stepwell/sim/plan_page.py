"""Plans as one page to read or print: curves, knees, where the next gigabyte should go, and what was assumed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from math import floor, log10

from stepwell.base.ids import Tier
from stepwell.sim.case import TIERS
from stepwell.sim.hardware import Hardware
from stepwell.sim.page import bullets, glossary, page, table
from stepwell.sim.plan import Bend, Knee, Plan, size_of, speed_up
from stepwell.sim.plan_chart import Axis, Curve, Mark, Style, chart, said_sizes, short_bytes
from stepwell.sim.plan_sessions import Sessions
from stepwell.sim.report import Report

STYLES = {
    Tier.DEVICE: Style(colour="var(--green)", dash="none", mark=Mark.CIRCLE),
    Tier.HOST: Style(colour="var(--blue)", dash="8 4", mark=Mark.SQUARE),
    Tier.STORE: Style(colour="var(--red)", dash="2 4", mark=Mark.TRIANGLE),
}
POINT_HEADS = ("tier", "device", "host", "store", "hit rate", "speed-up", "prefill", "TTFT p50 / p95")

WORDS_USED = (
    "device", "host", "store", "hit rate", "endless memory", "prefill", "speed-up", "TTFT", "knee", "page", "checkpoint",
    "policy",
)  # fmt: skip
LEAST_SHOWN_S = 1e-6

ABOUT = (
    "Recorded requests, replayed through a cache that keeps what a language model computed for earlier prompts. "
    "It shows how much computing each size of memory would have saved, and which memory to buy next."
)
ASSUMED = (
    "Every point is a replay of the whole trace, or of the part named above, through the production cache, beginning empty.",
    "Requests are served one at a time, without queueing; copies and fetches are counted in full and overlap with nothing.",
    "Answers are not cached: a trace does not contain them.",
    "Each tier is made smaller and larger with the others as given; no two tiers grow together.",
    "A knee is the point farthest above the straight line between the ends of a curve, with bytes on a straight axis.",
)


def draw_plans(plans: Sequence[Plan]) -> str:
    """The page."""
    return page("stepwell plan", ABOUT, "".join(chain(*map(_plan, plans))) + glossary(*WORDS_USED))


def point_cells(report: Report) -> tuple[str, ...]:
    """One replay's figures as text: sizes, then results."""
    return (
        *(short_bytes(size) if (size := size_of(report, tier)) else "none" for tier in TIERS),
        f"{report.hit_rate:.1%}",
        f"{speed_up(report):.2f}x",
        f"{report.prefill_s:,.1f} s",
        f"{report.ttft_p50_s:.2f} / {report.ttft_p95_s:.2f} s",
    )


def said_knee(knee: Knee) -> str:
    return short_bytes(knee.size_bytes) if knee.bend is Bend.KNEE else knee.bend.value


def said_next(plan: Plan) -> str:
    """Where the next gigabyte should go, as a sentence."""
    tier = plan.next_tier()
    if tier is None:
        return "The next gigabyte: no tier is worth growing on this trace."
    step = next(step for step in plan.steps() if step.tier is tier)
    worth = f"{short_seconds(step.per_gib_s)} of prefill saved per GiB"
    if step.per_money_s is not None:
        worth += f", {short_seconds(step.per_money_s)} per unit of money"
    return f"The next gigabyte: {tier.label}. {worth}, over the next {short_bytes(step.added_bytes)}."


def short_seconds(seconds: float) -> str:
    """Three significant digits, however small: one gigabyte of many saves little."""
    if abs(seconds) < LEAST_SHOWN_S:
        return "0 s"
    return f"{seconds:,.{max(2 - floor(log10(abs(seconds))), 0)}f} s"


def said_machine(machine: Hardware) -> str:
    """What times were estimated for, as a sentence."""
    return (
        f"Times are estimates for a machine (--hardware) that computes {machine.prefill_tokens_per_s:,.0f} tokens/s at the start "
        f"of a prompt and half of that at token {machine.prefill_half_tokens:,.0f}, takes {machine.request_latency_s * 1e3:g} ms "
        f"in addition for each request, loads from the host at {machine.host_bytes_per_s / 1e9:,g} GB/s after "
        f"{machine.host_latency_s * 1e3:g} ms, and from the store at {machine.store_bytes_per_s / 1e9:,g} GB/s after "
        f"{machine.store_latency_s * 1e3:g} ms."
    )


def said_sessions(sessions: Sessions) -> str:
    """How sessions were counted, as a sentence."""
    which = "sessions" if sessions.named else "prompts that no other prompt continues (the trace names no sessions)"
    return (
        f"{sessions.sessions:,} {which}; each counts the pages of its longest prompt and one checkpoint, sharing nothing: "
        f"{sessions.median_tokens:,} tokens and {short_bytes(sessions.median_bytes)} in the median, "
        f"{sessions.p95_tokens:,} and {short_bytes(sessions.p95_bytes)} at the 95th percentile."
    )


def session_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for tier in plan.curves:
        median, p95 = plan.sessions.fitting(tier, size_of(plan.base, tier))
        rows.append((tier.label, short_bytes(size_of(plan.base, tier)), f"{median:,}", f"{p95:,}"))
    return rows


def step_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for step in plan.steps():
        money = (step.per_money_s,) if step.per_money_s is not None else ()
        saved = map(short_seconds, (step.saved_s, step.per_gib_s, *money))
        rows.append((step.tier.label, short_bytes(step.added_bytes), *saved))
    return rows


def _plan(plan: Plan) -> Iterator[str]:
    yield from _opening(plan)
    yield from _charts(plan)
    knees = {tier: plan.knees(tier) for tier in plan.curves}
    rows = [(tier.label, said_knee(each["hit_rate"]), said_knee(each["speed_up"])) for tier, each in knees.items()]
    yield "<h2>Knees</h2>" + table(("tier", "of the hit rate", "of the speed-up"), rows, words=3)
    money = ("per unit of money",) if plan.prices else ()
    yield "<h2>Where the next gigabyte should go</h2>"
    yield table(("tier", "added", "saves", "per GiB", *money), step_rows(plan))
    yield f"<h2>Sessions at a time</h2><p>{escape(said_sessions(plan.sessions))}</p>"
    yield table(("tier", "size", "if all are the median", "if all are the 95th percentile"), session_rows(plan))
    points = [(tier.label, *point_cells(report)) for tier, curve in plan.curves.items() for report in curve]
    yield "<h2>Every point</h2>" + table(POINT_HEADS, points)
    yield "<h2>What was assumed</h2>" + bullets((*ASSUMED, said_machine(plan.base.hardware)))


def _opening(plan: Plan) -> Iterator[str]:
    base = plan.base
    about = f"{base.spec}, {base.requests:,} requests, policy {base.policy}, pages of {base.page_tokens} tokens."
    sizes = said_sizes({tier: size_of(base, tier) for tier in TIERS})
    given = (
        f"The sizes given are {sizes}. With them prefill takes {short_seconds(base.prefill_s)} for all requests together, "
        f"in place of {short_seconds(base.uncached_prefill_s)} without a cache, and the hit rate is {base.hit_rate:.1%}."
    )
    yield f"<h1>What memory buys: {escape(base.trace)}</h1><p>{escape(about)} {escape(given)}</p>"
    yield f"<p><strong>{escape(said_next(plan))}</strong></p>"


def _charts(plan: Plan) -> Iterator[str]:
    base = plan.base
    said_limit = f"endless memory: {base.ceiling:.1%}"
    hits = Axis(title="hit rate", top=1.0, form="{:.0%}", exact="{:.1%}", limit=base.ceiling, limit_said=said_limit)
    yield "<h2>Hit rate</h2>"
    yield '<p class="small">Each line changes the size of one tier. Filled: the sizes given. Ringed: the knee of that line.</p>'
    yield chart(_curves(plan, "hit_rate"), hits)
    most = max(speed_up(report) for curve in plan.curves.values() for report in curve)
    speeds = Axis(title="prefill speed-up", top=max(most, 2.0), form="{:.3g}x", exact="{:.2f}x")
    yield '<h2>Prefill speed-up</h2><p class="small">1x is as slow as without a cache.</p>'
    yield chart(_curves(plan, "speed_up"), speeds)


def _curves(plan: Plan, name: str) -> list[Curve]:
    value = speed_up if name == "speed_up" else (lambda report: report.hit_rate)
    curves = []
    for tier, reports in plan.curves.items():
        knee = plan.knees(tier)[name]
        curves.append(
            Curve(
                name=tier.label,
                style=STYLES[tier],
                points=[(size_of(report, tier), value(report)) for report in reports],
                given_bytes=size_of(plan.base, tier),
                knee_bytes=knee.size_bytes if knee.bend is Bend.KNEE else None,
            )
        )
    return curves
