"""Prompts under vLLM and SGLang: computed, saved and resumed by engines that follow each other, over Stepwell and over the
engine's own offloading. Each engine is a process of its own, with the interpreter it is installed for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 1800
NO_CACHE, PEER = "none", "peer"
HEADS = ("prompt", "over", "saving", "resumed", "x", "CPU", "tokens found", "MiB", "answers")
LEFT = ("prompt", "over", "answers")  # columns of words

Report = dict[str, Any]


class Engine(NamedTuple):
    name: str
    script: str
    venv: str
    install: str  # what makes that venv
    families: tuple[str, ...]
    caches: Mapping[str, str]  # what prompts are saved over: names in orders, and in tables

    @property
    def python(self) -> Path:
        return ROOT / self.venv / "bin" / "python"

    @property
    def num_lives(self) -> int:
        return 1 + 2 * len(self.caches)


ENGINES = {
    "vllm": Engine(
        "vLLM", "vllm_life.py", ".venv-vllm", "tests/vllm/install.sh", ("llama", "gemma3", "falcon_h1"),
        {"stepwell": "StepwellConnector", PEER: "its OffloadingConnector, with files"},
    ),
    "sglang": Engine(
        "SGLang", "sglang_life.py", ".venv-sglang", "make bench-tree-peer", ("llama",),
        {"stepwell": "StepwellHiCache", "linker": "StepwellLinker", PEER: "its file backend"},
    ),
}  # fmt: skip


def row(engine: Engine, family: str, tokens: int, prompts: int) -> Report:
    """What each life reported, or why it could not: that of a peer that does not run is no reason to stop.

    Without any cache, then all saving, then all resuming: what is compared runs next to each other.
    """
    found: Report = {"engine": engine.name, "family": family, "tokens": tokens, "prompts": prompts}
    with TemporaryDirectory(prefix="bench-connectors-", dir=ROOT) as directory:
        order = {"family": family, "tokens": tokens, "prompts": prompts, "directory": directory}
        found["alone"] = _run(engine, order, NO_CACHE)
        for life in ("saving", "resumed"):
            found[life] = {cache: _run(engine, order, cache) for cache in engine.caches}
    return found


def _run(engine: Engine, order: Report, cache: str) -> Report:
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [str(engine.python), str(HERE / engine.script), json.dumps(order | {"cache": cache})]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not done.returncode and said:
        report: Report = json.loads(said[-1])
        return report
    if cache != PEER:
        raise RuntimeError(f"{engine.name} over {cache}, {order}: {done.stderr[-2000:]}")
    return {"error": done.stderr[-2000:]}


def table(engine: Engine, found: Report) -> Table:
    """Seconds are the best of the prompts: other work on the machine makes them longer, never shorter."""
    title = f"Prompts under {engine.name}: seconds to the first token, and CPU seconds of resuming"
    made = Table(title=title, title_justify="left")
    for head in HEADS:
        made.add_column(head, justify="left" if head in LEFT else "right")
    alone = found["alone"]
    made.add_row(f"{found['family']}, {found['tokens']:,}", "nothing", "", _best(alone, "seconds"), "1", _best(alone, "cpu_s"))
    for cache, name in engine.caches.items():
        saving, resumed = found["saving"][cache], found["resumed"][cache]
        if "error" in saving or "error" in resumed:
            made.add_row("", name, "does not run")
            continue
        times = [_best(saving, "seconds"), _best(resumed, "seconds")]
        sooner = f"{min(alone['seconds']) / min(resumed['seconds']):.0f}"
        hits, size = f"{min(resumed['cached']):,}", f"{saving['bytes'] / 2**20:.0f}"
        same = _is_same(saving, alone) and _is_same(resumed, alone)
        made.add_row("", name, *times, sooner, _best(resumed, "cpu_s"), hits, size, "the same" if same else "OTHERS")
    return made


def _best(life: Report, what: str) -> str:
    return f"{min(life[what]):.2f}"


def _is_same(life: Report, alone: Report) -> bool:
    """Whether tokens are those of the engine alone, and log probabilities to three digits."""
    pairs = zip(life["answers"], alone["answers"], strict=True)
    return all(tokens == wanted and abs(logprob - near) <= 1e-3 for (tokens, logprob), (wanted, near) in pairs)
