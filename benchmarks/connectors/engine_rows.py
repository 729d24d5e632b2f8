"""Prompts under vLLM and SGLang: computed, saved and resumed by engines that follow each other, over Stepwell and over the
engine's own offloading. Each engine is a process of its own, with the interpreter it is installed for.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 1800
# Without any cache, then both saving, then both resuming: what is compared runs next to each other.
LIVES = (("alone", "none"), ("first", "stepwell"), ("peer first", "peer"), ("resumed", "stepwell"), ("peer resumed", "peer"))
HEADS = ("model", "alone", "saving", "peer", "resumed", "peer", "x", "tokens found", "peer", "MiB", "peer", "answers")


class Engine(NamedTuple):
    name: str
    peer: str
    script: str
    venv: str
    install: str  # what makes that venv
    families: tuple[str, ...]

    @property
    def python(self) -> Path:
        return ROOT / self.venv / "bin" / "python"


ENGINES = {
    "vllm": Engine(
        "vLLM", "its OffloadingConnector with files", "vllm_life.py", ".venv-vllm", "tests/vllm/install.sh",
        ("llama", "gemma3", "falcon_h1"),
    ),
    "sglang": Engine("SGLang", "its file backend", "sglang_life.py", ".venv-sglang", "make bench-tree-peer", ("llama",)),
}  # fmt: skip


def row(engine: Engine, family: str, tokens: int, prompts: int) -> dict[str, Any]:
    """What each life reported, or why it could not: that of a peer that does not run is no reason to stop."""
    found: dict[str, Any] = {"engine": engine.name, "family": family, "tokens": tokens, "prompts": prompts}
    with TemporaryDirectory(prefix="bench-connectors-", dir=ROOT) as directory:
        for life, cache in LIVES:
            order = {"family": family, "tokens": tokens, "prompts": prompts, "cache": cache, "directory": directory}
            found[life] = _run(engine, order)
            if "error" in found[life] and cache != "peer":
                raise RuntimeError(f"{engine.name}, {order}: {found[life]['error']}")
    return found


def _run(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [str(engine.python), str(HERE / engine.script), json.dumps(order)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not said:
        return {"error": done.stderr[-2000:]}
    report: dict[str, Any] = json.loads(said[-1])
    return report


def table(engine: Engine, rows: list[dict[str, Any]]) -> Table:
    """Seconds are the best of a row's prompts: other work on the machine makes them longer, never shorter."""
    made = Table(
        title=f"Prompts under {engine.name}, seconds to the first token; the peer is {engine.peer}", title_justify="left"
    )
    for head in HEADS:
        made.add_column(head, justify="left" if head in ("model", "answers") else "right")
    for each in rows:
        alone, resumed = min(each["alone"]["seconds"]), min(each["resumed"]["seconds"])
        times = [_best(each[life]) for life in ("alone", "first", "peer first", "resumed", "peer resumed")]
        hits = [_hits(each[life]) for life in ("resumed", "peer resumed")]
        sizes = [_size(each[life]) for life in ("first", "peer first")]
        made.add_row(f"{each['family']}, {each['tokens']:,}", *times, f"{alone / resumed:.0f}", *hits, *sizes, _answers(each))
    return made


def _best(life: dict[str, Any]) -> str:
    return f"{min(life['seconds']):.2f}" if "seconds" in life else "does not run"


def _hits(life: dict[str, Any]) -> str:
    return f"{min(life['cached']):,}" if "cached" in life else "-"


def _size(life: dict[str, Any]) -> str:
    return f"{life['bytes'] / 2**20:.0f}" if "bytes" in life else "-"


def _answers(each: dict[str, Any]) -> str:
    """Whether tokens are those of the engine alone, and log probabilities to three digits."""
    wrong = []
    for life, _ in LIVES[1:]:
        for (tokens, logprob), (wanted, near) in zip(each[life].get("answers", ()), each["alone"]["answers"], strict=False):
            if tokens != wanted or abs(logprob - near) > 1e-3:
                wrong.append(life)
                break
    return "the same" if not wrong else f"OTHERS: {', '.join(wrong)}"
