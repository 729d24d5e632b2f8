"""Starts one life of an engine, waits for its end, and reads what it said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 600


def live(order: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("play.py")), json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not said:
        raise RuntimeError(f"an engine over {order['store']} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(said[-1])
    return result
