"""Servers of SGLang's, started by the command of docs/sglang.md, asked over HTTP and killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes_of_sglang import PYTHON, ROOT

from stepwell.jobs.children import start_child

HERE = Path(__file__).parent
PATIENCE_S = 300.0
MODULE = "python -m sglang.launch_server "
# What a machine without a GPU needs in addition to the recipe, and what a model without a tokenizer does.
ON_CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--dtype", "float32",
    "--max-total-tokens", "8192", "--skip-tokenizer-init", "--log-level", "warning",
)  # fmt: skip


def recipe(document: Path, having: str) -> list[str]:
    """The arguments of the command in a document's code that has this word, with places and sizes as they are written there."""
    blocks: list[str] = re.findall(r"^```\w*\n(.*?)^```", document.read_text(), re.M | re.S)
    (command,) = [part for block in blocks for part in block.split("\n\n") if MODULE in part and having in part]
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("sglang.launch_server") + 1 :]


def served(arguments: Sequence[str], *, model: Path, store: Path) -> list[str]:
    """The recipe for this model and a store of its own, small enough for a test, and patient with a busy machine."""
    written = {"/var/cache/stepwell": str(store), "500GiB": "1GiB", '"64GiB"': '"256MiB", "fetch_wait_s": 60'}
    filled = []
    for argument in arguments:
        for text, ours in written.items():
            argument = argument.replace(text, ours)
        filled.append(str(model) if argument == "..." else argument)
    return filled


@contextmanager
def server(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Where it answers. Killed in the end, with the processes it made."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(PYTHON), str(HERE / "serve_on_cpu.py"), *ON_CPU, *arguments, "--port", str(port)]
    with log.open("ab") as said:
        process = start_child(
            command, stdout=said, stderr=said, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: no other process is in it
        process.wait()


def ask(address: str, prompt: Sequence[int], *, answer: int) -> dict[str, Any]:
    given = {"temperature": 0.0, "max_new_tokens": answer, "ignore_eos": True}
    body = json.dumps({"input_ids": list(prompt), "sampling_params": given, "return_logprob": True}).encode()
    request = urllib.request.Request(f"{address}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        said: dict[str, Any] = json.load(response)
    return said


def logprobs(said: dict[str, Any]) -> list[float]:
    return [float(each[0]) for each in said["meta_info"]["output_token_logprobs"]]


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, f"the server ended: {log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"the server did not start: {log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
