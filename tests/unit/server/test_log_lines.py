"""Lines of the log, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from stepwell.jobs.children import start_child
from stepwell.server.monitoring import log_lines
from stepwell.server.monitoring.log_lines import log_to
from waiting import PATIENCE_S

FIELDS = {"id": "cmpl-1", "tenant": "a b", "total_s": 0.25}


def written(form: str) -> list[str]:
    stream, log = io.StringIO(), logging.getLogger("stepwell.server.somewhere")
    with log_to(stream, form):
        log.info("request ended", extra={"fields": FIELDS})
        log.info("said %s", "one\ntwo")
        logging.getLogger("others").info("not for us")
        logging.getLogger("others").warning("careful")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
    log.info("after the end")
    return stream.getvalue().splitlines()


def test_text_is_one_line_an_event_whatever_a_message_holds() -> None:
    lines = [line.partition("Z ")[2] or line for line in written("text")]
    assert lines[0] == 'info request ended id=cmpl-1 tenant="a b" total_s=0.25'
    assert lines[1] == "info said one\\ntwo"
    assert lines[2] == "warning careful"
    assert lines[3] == "error it failed" and lines[-1] == "ValueError: broken"


def test_json_is_one_object_a_line_with_the_fields_beside_the_message() -> None:
    lines = [json.loads(line) for line in written("json")]
    assert [line["message"] for line in lines] == ["request ended", "said one\ntwo", "careful", "it failed"]
    assert {name: lines[0][name] for name in FIELDS} == FIELDS
    assert lines[0]["level"] == "info" and lines[0]["time"].endswith("Z")
    assert "ValueError: broken" in lines[3]["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_logging_is_as_it_was_afterwards(form: str) -> None:
    before = list(logging.getLogger().handlers), logging.getLogger("stepwell").level
    written(form)
    assert (list(logging.getLogger().handlers), logging.getLogger("stepwell").level) == before


class Unread(io.StringIO):
    """A pipe that is full, and that nobody reads until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = Event()

    def write(self, text: str) -> int:
        assert self.let_go.wait(PATIENCE_S)
        return super().write(text)


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_MOST_WAITING", 5)
    monkeypatch.setattr(log_lines, "_LAST_LINES_S", 0.05)
    stream = Unread()
    with log_to(stream, "text"):
        for number in range(100):
            logging.getLogger("stepwell.here").info("line %d", number)
    assert not stream.getvalue()
    stream.let_go.set()


FULL = """
import logging, os, sys
from stepwell.server.monitoring import log_lines
log_lines._LAST_LINES_S = 0.05
with log_lines.log_to(sys.stderr, "text"):
    for number in range(20_000):  # more than a pipe holds
        logging.getLogger("stepwell.here").info("line %d", number)
print("ends", flush=True)
"""


def test_a_program_whose_log_nobody_reads_can_end() -> None:
    with start_child([sys.executable, "-c", FULL], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.stdout.readline() == b"ends\n"
        assert program.wait(PATIENCE_S) == 0
        assert program.stderr.read().startswith(b"20")  # nobody read it before


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    broken = FULL.replace("sys.stderr, ", "open('/dev/full', 'w'), ")
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == b"ends\n" and not done.stderr


def test_what_has_no_form_in_utf_8_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of the tests' own reports, which cannot be sent with that
    with (tmp_path / "log").open("w") as file, log_to(file, "text"):
        logging.getLogger("stepwell.here").info("a field \ud800")
    assert (tmp_path / "log").read_text().endswith("info a field \\ud800\n")
