"""What a run says at its end of the tests that did not run: how many, why, and how to have them run.

A reason names the way itself ("no CUDA device here: run `make test` where there is one"); a package that is missing is
named by pytest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

NO_CUDA = "no CUDA device here: run `make test` on a machine that has one"
INSTALL = "pip install -e '.[serve,events,mooncake,test]'"


def not_run(reports: Iterable[Any]) -> list[str]:
    """A line for each reason, the most frequent first."""
    reasons = Counter(_reason(report.longrepr) for report in reports)
    ordered = sorted(reasons.items(), key=lambda each: (-each[1], each[0]))
    return [f"{count} {'test' if count == 1 else 'tests'}: {reason}" for reason, count in ordered]


def _reason(skip: Any) -> str:
    text = " ".join(str(skip[2] if isinstance(skip, (tuple, list)) else skip).removeprefix("Skipped: ").split())
    return f"{text} ({INSTALL})" if "could not import" in text else text


# The deep tests that this process left out; workers of pytest-xdist report theirs to the process that prints the summary.
NUM_DEEP = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_deep"] = session.config.stash.get(NUM_DEEP, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    found = getattr(node, "workeroutput", {}).get("num_deep", 0)
    node.config.stash[NUM_DEEP] = max(found, node.config.stash.get(NUM_DEEP, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = not_run(terminalreporter.stats.get("skipped", []))
    num_deep = config.stash.get(NUM_DEEP, 0)
    if num_deep:
        lines.append(f"{num_deep} deep tests, and those on a GPU, under other engines and in a browser: run `make test-all`")
    if lines:
        terminalreporter.section("not run", yellow=True)
    for line in lines:
        terminalreporter.write_line(line)
