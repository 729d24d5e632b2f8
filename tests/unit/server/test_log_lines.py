"""Lines of the log, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest

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


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    program = """
import logging, sys
from stepwell.server.monitoring.log_lines import log_to
with log_to(sys.stderr, "text"):
    for number in range(1000):
        logging.getLogger("stepwell.here").info("line %d", number)
print("ends", flush=True)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, timeout=PATIENCE_S)
    assert done.stdout == b"ends\n"


def test_text_that_utf_8_cannot_hold_is_written_to_stderr_all_the_same() -> None:
    program = """
import logging, sys
from stepwell.server.monitoring.log_lines import log_to
with log_to(sys.stderr, "text"):
    logging.getLogger("stepwell.here").info("a field %s", chr(0xD800))
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    assert done.stderr.endswith(b"info a field \\ud800\n")
