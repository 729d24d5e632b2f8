"""Tests in this folder run against a real master and real clients, inside a private network (`examples/demo_cluster`).

Seen from outside they are tests like any other; where no such network can be had they are skipped, and the run says why.
Fixtures for tests: `cluster`, and `shared_cluster` for a whole class.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from inner_run import PIPES, InnerRun, obey, send
from mooncake_cluster import Cluster

from demo_cluster.private_network import why_not

HERE = Path(__file__).parent
IS_INSIDE = PIPES in os.environ
RUN = pytest.StashKey[InnerRun]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    if ours and not IS_INSIDE and why_not():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"Mooncake: {why_not()}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if IS_INSIDE or not item.path.is_relative_to(HERE) or why_not():
        return None
    run = _run_for(item.session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run.run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_for(session: pytest.Session) -> InnerRun:
    """The one inner run of a session or worker, begun with its first test."""
    config = session.config
    if RUN not in config.stash:
        config.stash[RUN] = InnerRun(config, HERE)
        config.add_cleanup(config.stash[RUN].stop)
    return config.stash[RUN]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not IS_INSIDE:
        return None
    obey(session)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IS_INSIDE and item.path.is_relative_to(HERE):
        send(item.config, report)
    return report


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A master of one's own, and whatever is started with it."""
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="class")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster
