"""SGLang's file backend in a process of its own, with the Python it is installed for (`peers/sglang_files.py`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from stepwell.jobs.children import start_child
from store.load import Load, Took

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
ASKED = 4096


def is_installed() -> bool:
    return PYTHON.exists()


class SglangFiles:
    name = "SGLang files"

    def __init__(self, load: Load, directory: Path) -> None:
        self._load, self._directory = load, directory / "sglang"
        self._directory.mkdir()
        script = ROOT / "benchmarks" / "peers" / "sglang_files.py"
        command = [str(PYTHON), "-W", "ignore", str(script), str(self._directory), str(load.value_bytes), str(load.count)]
        self._said = (directory / "sglang.log").open("wb")
        self._process = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True)
        self._life = 0
        self._hear()

    def write(self, life: int) -> Took:
        for path in self.files():
            path.unlink()
        self._life = life
        return self._ask("write")

    def read(self) -> Took:
        return self._ask("read")

    def exists(self) -> Took:
        return self._ask("exists", most=ASKED)

    def files(self) -> list[Path]:
        return sorted(self._directory.iterdir())

    def close(self) -> None:
        self._process.communicate()
        self._said.close()

    def _ask(self, do: str, most: int | None = None) -> Took:
        names = [key.hex() for key in self._load.keys(self._life)[:most]]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "names": names}) + "\n")
        self._process.stdin.flush()
        return Took(**self._hear())

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"SGLang's process ended with {self._process.wait()}: see {self._said.name}"
        return json.loads(line)
