"""Several ranks of a model, each a real process, connected by gloo. Waits for them, and not forever; ends them itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stepwell.jobs.children import start_child

WORKER = Path(__file__).with_name("rank_worker.py")
LIMIT_S = 600.0  # of a job, the start of its processes included


class RankProcesses:
    """Started with the first job, and again after one that failed. `close` ends them."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self._folder = size, folder
        self.running: list[subprocess.Popen[str]] = []
        self._starts = 0

    def run(self, folder: Path, **job: Any) -> list[dict[str, torch.Tensor]]:
        """What each rank makes of the checkpoint in `folder`, in their order. Raises AssertionError with what they said."""
        if not self.running:
            self._start()
        for process in self.running:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
            process.stdin.flush()
        self._await()
        return [load_file(folder / f"rank{rank}of{self.size}.safetensors") for rank in range(self.size)]

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        self.running = []

    def _start(self) -> None:
        self._starts += 1
        paths = [str(WORKER.parent.parent), *(each for each in sys.path if each)]
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        for rank in range(self.size):
            with self._said(rank).open("w") as said:
                started = start_child(
                    [sys.executable, str(WORKER), str(rank), str(self.size), str(self._folder / f"meeting{self._starts}")],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=env,
                )  # fmt: skip
            self.running.append(started)

    def _said(self, rank: int) -> Path:
        return self._folder / f"rank{rank}of{self.size}.txt"

    def _await(self) -> None:
        """Until all have answered; one that ends or is silent too long ends them all."""
        deadline, waiting = time.monotonic() + LIMIT_S, dict(enumerate(self.running))
        with DefaultSelector() as selector:
            for rank, process in waiting.items():
                assert process.stdout is not None
                selector.register(process.stdout, EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if line != "done\n":
                        self._fail(key.data, "ended")
                    selector.unregister(key.fileobj)
                    del waiting[key.data]
                if not ready:
                    self._fail(next(iter(waiting)), f"did not answer within {LIMIT_S} s")

    def _fail(self, rank: int, how: str) -> None:
        self.close()
        said = "\n".join(f"rank {each}: {self._said(each).read_text()[-3000:]}" for each in range(self.size))
        raise AssertionError(f"rank {rank} of {self.size} {how}\n{said}")


def write_checkpoint(folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
