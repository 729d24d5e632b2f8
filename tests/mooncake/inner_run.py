"""Tests that run in another pytest, inside a private network, and are reported by this one as its own.

The other pytest gets the next test to run by a pipe, and writes every report to another, in the form pytest has for that. So each
worker of a parallel run has one of its own, that runs what the worker is given and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from demo_cluster.private_network import inside
from stepwell.jobs.children import start_child

PIPES = "STEPWELL_INNER_RUN"  # set in the inner run: the file descriptors that orders come from and reports go to


class InnerRun:
    """One pytest in a private network. Ends when `stop` is called, or when its pipe of orders is closed."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        (orders, ordering), (reading, reports) = os.pipe(), os.pipe()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={config.rootpath}"]
        self._process = start_child(
            inside([*command, str(folder)]),
            pass_fds=(orders, reports),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=config.rootpath,
            env={**os.environ, PIPES: f"{orders} {reports}"},
        )
        os.close(orders)
        os.close(reports)
        self._orders, self._reports = os.fdopen(ordering, "wb"), os.fdopen(reading, "rb")

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Everything reported of a test, once it is over. A failure, if the inner run ended without it."""
        found: list[pytest.TestReport] = []
        try:
            self._orders.write(json.dumps([item.nodeid, nextitem and nextitem.nodeid]).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            return [self._lost(item)]
        while not any(report.when == "teardown" for report in found):
            line = self._reports.readline()
            if not line:
                return [*found, self._lost(item)]
            found.append(self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line)))
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reports.close()
        self._output.close()
        with suppress(BrokenPipeError):  # of an order that was not read
            self._orders.close()

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        status = self._process.wait()
        self._output.seek(0)
        said = self._output.read()[-6000:].decode(errors="replace")
        return pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", when="call",
            longrepr=f"the run inside the private network ended (status {status}) without a word on this test:\n{said}",
        )  # fmt: skip


def obey(session: pytest.Session) -> None:
    """From inside: runs what is ordered, until no order can come any more."""
    items = {item.nodeid: item for item in session.items}
    with open(_pipes()[0], "rb") as orders:
        for line in orders:
            nodeid, nextid = json.loads(line)
            item = items[nodeid]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(nextid))


def send(config: pytest.Config, report: pytest.TestReport) -> None:
    """From inside: passes a report on."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    line = json.dumps(data).encode() + b"\n"
    with open(_pipes()[1], "wb", closefd=False) as pipe:
        pipe.write(line)


def _pipes() -> tuple[int, int]:
    orders, reports = os.environ[PIPES].split()
    return int(orders), int(reports)
