"""`stepwell explain TRACE...`: why tokens of a trace were computed despite the cache, and what would help.

Prints; decides nothing. Every request goes through the production cache, with a copy engine that only counts.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from stepwell.base.errors import ConfigError
from stepwell.cli.cases import add_arguments, cases_of, one_or_all, print_table, wants_tables, watched, write
from stepwell.cli.command import Command
from stepwell.sim.case import Case
from stepwell.sim.why_page import REASON_HEADS, SESSION_HEADS, draw_explained, reason_rows, session_rows
from stepwell.sim.why_replay import Explained, explain_trace

WORST = 5  # sessions that are shown


def configure(parser: ArgumentParser) -> None:
    add_arguments(parser)


def run(args: Namespace) -> int:
    cases = cases_of(args)
    explained = [_watch(case) for case in cases]
    if wants_tables(args):
        for each in explained:
            _print(each)
    if args.json is not None:
        rows = [each.as_json(worst=WORST) for each in explained]
        write(args.json, json.dumps(one_or_all(rows, "traces"), indent=2) + "\n")
    if args.html is not None:
        write(args.html, draw_explained(explained, cases[0].sizes, worst=WORST))  # cases differ in their traces only
    return 0


def _watch(case: Case) -> Explained:
    """Replays with a bar on stderr. Raises ConfigError for a trace without requests."""
    with watched(case, case.trace.name) as (trace, advance):
        explained = explain_trace(trace, case.setup(), policy=case.policy, on_request=advance)
    if not explained.total.requests:
        raise ConfigError(f"{case.trace} has no requests to explain")
    return explained


def _print(explained: Explained) -> None:
    total = explained.total
    hits = 1 - total.computed_tokens / max(total.prompt_tokens, 1)
    counts = f"{total.computed_tokens:,} of {total.prompt_tokens:,}"
    title = f"{explained.trace}, {explained.spec}: why {counts} tokens were computed (hit rate {hits:.1%})"
    print_table(title, _brief(REASON_HEADS), map(_brief, reason_rows(total)), words=2)
    if explained.sessions:
        print_table(
            f"the worst of {len(explained.sessions):,} sessions", SESSION_HEADS, session_rows(explained, worst=WORST), words=2
        )


def _brief(cells: tuple[str, ...]) -> tuple[str, ...]:
    """Without the meaning of the reason: a terminal is too narrow for it."""
    return (cells[0], *cells[2:])


COMMAND = Command(name="explain", summary="Explain why tokens of a trace were computed.", configure=configure, run=run)
