"""How long `stepwell serve` takes to start on a GPU, part by part: with no kernel compiled before, and once more.

    make bench-start         about 5 minutes on an H200; writes bench-start.json

Random weights of Qwen3-8B's shape are written to a directory. The first start has an empty cache of compiled kernels. Each start
answers a prompt as soon as it is ready, and is stopped with SIGTERM. `--tiny` runs the script on a small model, anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from rich.console import Console

from gpu.shapes import QWEN, make
from report import Row, machine, table_of
from stepwell.jobs.children import start_child

ROOT = Path(__file__).parents[1]
PHASE = re.compile(r"start: (.+) took ([\d.]+) s")
LINES = re.compile(r"start:|kernels|first pass|stored in time|ready|compil")  # of the log, that are shown
MOST_S, PROMPT_TOKENS = 400.0, 2048


def write_model(directory: Path, *, device: str, tiny: bool) -> None:
    made = make(QWEN, device, tiny=tiny)
    made.model.save_pretrained(directory)
    del made
    if device != "cpu":
        torch.cuda.empty_cache()


class Server:
    """One `stepwell serve`, from its start to its end."""

    def __init__(self, model: Path, directory: Path, args: argparse.Namespace, console: Console) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        memory = ["--device-memory", "64MiB", "--host-memory", "64MiB"] if args.tiny else ["--host-memory", args.host_memory]
        command = [
            sys.executable, "-m", "stepwell", "serve", "--model", str(model), "--port", str(self.port), *memory,
            "--store", f"log:{directory / 'log'}", "--store-budget", "1GiB" if args.tiny else "64GiB",
        ]  # fmt: skip
        environment = os.environ | {
            "FLASHINFER_WORKSPACE_BASE": str(directory / "flashinfer"),
            "TRITON_CACHE_DIR": str(directory / "triton"),
        }
        self.phases: dict[str, float] = {}
        self.began_s = time.monotonic()
        self.process = start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
        self._console = console
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None, "the log is a pipe"
        for line in self.process.stderr:
            if found := PHASE.search(line):
                self.phases[found[1]] = float(found[2])
            if LINES.search(line):
                self._console.print(f"  {time.monotonic() - self.began_s:6.1f} s  {line.rstrip()}", markup=False, highlight=False)

    def ready_s(self) -> float:
        while self.process.poll() is None and time.monotonic() - self.began_s < MOST_S:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return time.monotonic() - self.began_s
            except (URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"the server is not ready: {self.process.poll()}")

    def answer_s(self, tokens: int) -> float:
        body = json.dumps({"model": "x", "prompt": list(range(1, tokens + 1)), "max_tokens": 1, "temperature": 0}).encode()
        with urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=10) as listed:
            name = json.load(listed)["data"][0]["id"]
        body = json.dumps({**json.loads(body), "model": name}).encode()
        began_s = time.monotonic()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{self.port}/v1/completions", body, headers), timeout=120) as answer:
            answer.read()
        return time.monotonic() - began_s

    def stop_s(self) -> float:
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return time.monotonic() - began_s


def measure(what: str, model: Path, directory: Path, args: argparse.Namespace, console: Console) -> Row:
    console.print(f"{what}:")
    server = Server(model, directory, args, console)
    try:
        ready_s = server.ready_s()
        tokens = 128 if args.tiny else PROMPT_TOKENS
        answers = [server.answer_s(tokens + at) for at in range(3)]
    finally:
        stop_s = server.stop_s()
    figures: dict[str, Any] = {"ready, s": ready_s, **{f"{name}, s": took for name, took in server.phases.items()}}
    figures |= {"first answer, s": answers[0], "third answer, s": answers[2], "stop, s": stop_s}
    return Row(what=what, figures=figures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU too")
    parser.add_argument("--host-memory", default="48GiB", metavar="SIZE")
    parser.add_argument(
        "--dir", type=Path, help="for the model, the store and compiled kernels (default: the temporary directory)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench-start.json")
    args = parser.parse_args(argv)
    console = Console(width=180)
    if not args.tiny and not torch.cuda.is_available():
        console.print("bench-start: no CUDA here, nothing was measured (--tiny runs the script on a small model)")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with TemporaryDirectory(dir=args.dir, prefix="bench-start-") as made:
        directory = Path(made)
        write_model(directory / "model", device=device, tiny=args.tiny)
        rows = [measure(what, directory / "model", directory, args, console) for what in ("first start", "second start")]
    columns = [Row(what=name, figures={row.what: row.figures.get(name, "") for row in rows}) for name in dict.fromkeys(
        name for row in rows for name in row.figures
    )]  # fmt: skip
    console.print(table_of("Starting a server", columns))
    args.out.write_text(json.dumps({"machine": machine(device), "rows": [row.as_json() for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
