"""Plans as one page to read or print: curves, knees, where the next gigabyte should go, and what was assumed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from html import escape
from itertools import chain

from stepwell.base.ids import Tier
from stepwell.sim.picture import page, table
from stepwell.sim.plan import Plan, size_of, speed_up
from stepwell.sim.plan_case import TIERS
from stepwell.sim.plan_chart import Axis, Curve, Style, chart, short_bytes
from stepwell.sim.plan_knee import Bend, Knee
from stepwell.sim.plan_sessions import Sessions
from stepwell.sim.report import Report

STYLES = {
    Tier.DEVICE: Style(colour="#0b6e4f", dash="none", sides=0),
    Tier.HOST: Style(colour="#1f4e9c", dash="8 4", sides=4),
    Tier.STORE: Style(colour="#b23a48", dash="2 4", sides=3),
}
POINT_HEADS = ("tier", "device", "host", "store", "hit rate", "speed-up", "prefill", "TTFT p50 / p95")

ASSUMED = (
    "Every point is a replay of the whole trace, or of the part named above, through the production cache, beginning empty.",
    "Requests are served one at a time and wait for nobody; copies and fetches are counted in full, and overlap with nothing.",
    "Answers are not cached: a trace does not say what they hold.",
    "Each tier is made smaller and larger with the others as given; two tiers grown together are not looked at.",
    "A knee is the point farthest above the straight line between the ends of a curve, with bytes on a straight axis.",
)


def draw_plans(plans: Sequence[Plan]) -> str:
    """The page."""
    return page("stepwell plan", "".join(chain(*map(_plan, plans))))


def point_cells(report: Report) -> tuple[str, ...]:
    """One replay's figures for people: sizes, then what they gave."""
    return (
        *(short_bytes(size) if (size := size_of(report, tier)) else "none" for tier in TIERS),
        f"{report.hit_rate:.1%}",
        f"{speed_up(report):.2f}x",
        f"{report.prefill_s:,.0f} s",
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
    worth = f"{step.per_gib_s:,.2f} s of prefill saved per GiB"
    if step.per_money_s is not None:
        worth += f", {step.per_money_s:,.2f} s per unit of money"
    return f"The next gigabyte: {tier.label}. {worth}, over the next {short_bytes(step.added_bytes)}."


def said_sessions(sessions: Sessions) -> str:
    """How sessions were counted, as a sentence."""
    which = "sessions" if sessions.named else "prompts that no other goes on from (the trace names no sessions)"
    return (
        f"{sessions.sessions:,} {which}; each counts the pages of its longest prompt and one checkpoint, sharing nothing: "
        f"{sessions.median_tokens:,} tokens and {short_bytes(sessions.median_bytes)} in the median, "
        f"{sessions.p95_tokens:,} and {short_bytes(sessions.p95_bytes)} at the 95th percentile."
    )


def session_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for tier in plan.curves:
        median, p95 = plan.sessions.fitting(size_of(plan.base, tier))
        rows.append((tier.label, short_bytes(size_of(plan.base, tier)), f"{median:,}", f"{p95:,}"))
    return rows


def step_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for step in plan.steps():
        money = (f"{step.per_money_s:,.3f} s",) if step.per_money_s is not None else ()
        rows.append(
            (step.tier.label, short_bytes(step.added_bytes), f"{step.saved_s:,.1f} s", f"{step.per_gib_s:,.3f} s", *money)
        )
    return rows


def _plan(plan: Plan) -> Iterator[str]:
    base = plan.base
    about = f"{base.spec}, {base.requests:,} requests, policy {base.policy}, pages of {base.page_tokens} tokens"
    yield f"<h1>What memory buys: {escape(base.trace)}</h1><p>{escape(about)}</p>"
    yield f"<p><b>{escape(said_next(plan))}</b></p>"
    hits = Axis(title="hit rate", top=1.0, form="{:.0%}", limit=base.ceiling, limit_said=f"endless memory: {base.ceiling:.1%}")
    yield "<h2>Hit rate</h2>" + chart(_curves(plan, "hit_rate"), hits)
    most = max(speed_up(report) for curve in plan.curves.values() for report in curve)
    speeds = Axis(title="prefill speed-up", top=max(most * 1.1, 2.0), form="{:.3g}x")
    yield "<h2>Prefill speed-up</h2>" + chart(_curves(plan, "speed_up"), speeds)
    yield '<p class="small">Each line changes one tier. Filled: the sizes given. Ringed: the knee.</p>'
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
    yield f"<h2>What was assumed</h2><ul>{''.join(f'<li>{escape(each)}</li>' for each in (*ASSUMED, _hardware(base)))}</ul>"


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


def _hardware(report: Report) -> str:
    values = ", ".join(f"{field.name} = {getattr(report.hardware, field.name):g}" for field in fields(report.hardware))
    return f"Times are estimates for this machine: {values}."
