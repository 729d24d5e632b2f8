"""Tests that run in another pytest, inside a private network, and are reported by this one as its own.

The other pytest gets the ids of the tests and writes every report to a pipe, in the form pytest has for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence

import pytest
from private_network import inside

REPORTS = "STEPWELL_REPORTS_TO"  # set in the inner run: the file descriptor of the pipe


class InnerRun:
    """One pytest in a private network. Ends when `stop` is called, or when nobody reads its reports any more."""

    def __init__(self, config: pytest.Config, nodeids: Sequence[str]) -> None:
        self._config = config
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}", *nodeids]
        self._process = subprocess.Popen(
            inside(command),
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=config.rootpath,
            env={**os.environ, REPORTS: str(writing)},
        )
        os.close(writing)
        self._pipe = os.fdopen(reading, "rb")
        self._reports: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Everything reported of a test, as soon as it is over. A failure, if the inner run ended without it."""
        found = self._reports[item.nodeid]
        while not any(report.when == "teardown" for report in found):
            line = self._pipe.readline()
            if not line:
                return [*found, self._lost(item)]
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
            self._reports[report.nodeid].append(report)
        return found

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        status = self._process.wait()
        self._output.seek(0)
        said = self._output.read()[-6000:].decode(errors="replace")
        return pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", when="call",
            longrepr=f"the run inside the private network ended (status {status}) without a word on this test:\n{said}",
        )  # fmt: skip


def send(config: pytest.Config, report: pytest.TestReport) -> None:
    """From inside: passes a report on."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    line = json.dumps(data).encode() + b"\n"
    with open(int(os.environ[REPORTS]), "wb", closefd=False) as pipe:
        pipe.write(line)
