"""Programs that tests start, talk to and kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepwell.jobs.children import start_child


class Process:
    """A program, with its words in a file. Killed, never asked to end."""

    def __init__(self, command: Sequence[str], log: Path, **streams: Any) -> None:
        self._log_path = log
        with log.open("ab") as said:
            self._process = start_child(command, stderr=said, **streams)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def said(self) -> str:
        return self._log_path.read_bytes()[-3000:].decode(errors="replace")


class Peer(Process):
    """A Python script in a process of its own that answers every line of JSON on its input by one on its output.

    It gets the options of a store as JSON in its first argument, and says a first line when it is ready.
    """

    def __init__(self, script: Path, options: dict[str, str], arguments: Sequence[str], log: Path) -> None:
        command = [sys.executable, str(script), json.dumps(options), *arguments]
        super().__init__(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.hear()

    def ask(self, do: str, **order: Any) -> Any:
        self.tell(do, **order)
        return self.hear()

    def tell(self, do: str, **order: Any) -> None:
        """Sends an order without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._log_path.stem} ended with {self._process.wait()}:\n{self.said()}"
        return json.loads(line)

    def kill(self) -> None:
        super().kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
