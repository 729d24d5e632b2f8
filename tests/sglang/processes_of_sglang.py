"""Processes with the interpreter that SGLang is installed for, and what they say."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"

# Minutes, and 3 GB to install: only on request.
asked_for = pytest.mark.skipif("STEPWELL_TEST_SGLANG" not in os.environ, reason="under SGLang itself: run `make test-sglang`")


def life(script: str, what: str, directory: Path) -> dict[str, Any]:
    """Runs one of the scripts here; what it says in its last line."""
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).parent / script), what, str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
