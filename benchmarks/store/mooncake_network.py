"""Runs `mooncake_run.py` inside a private network, and says why where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from stepwell.cli.demo_cluster.private_network import inside, why_not
from stepwell.jobs.children import start_child

LIMIT_S = 120
__all__ = ["measured", "why_not"]


def measured(sets: Sequence[tuple[int, int]], rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each measurement, as it is made; ends early when the run takes too long, or fails, and says why."""
    script = Path(__file__).with_name("mooncake_run.py")
    command = inside([sys.executable, str(script), str(rounds), json.dumps(list(sets))])
    with (
        tempfile.TemporaryFile("w+") as said,
        start_child(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        limit = Timer(LIMIT_S, process.kill)  # everything inside goes with it
        limit.start()
        try:
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
            if process.wait() != 0:
                said.seek(0)
                sys.stderr.write(f"the run over Mooncake ended early: {said.read()[-1000:]}\n")
        finally:
            limit.cancel()
            process.kill()
