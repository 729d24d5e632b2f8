"""Prompts under vLLM and SGLang: computed, saved, and resumed in another process, compared with the engine's own offloading.

    make bench-connectors                          about 40 minutes on 2 cores; prints tables, writes bench-connectors.json
    make bench-connectors ARGS="--engines vllm"    one of them

Random weights in the shapes of three families, on the CPU. Each engine is a process of its own, with the interpreter that it is
installed for: without any cache, then all saving, then all resuming, so that what is compared runs next to each other. An engine
that is not installed is left out. Seconds are the best of three prompts: other work on the machine only makes them longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from report import ROOT, machine, write

LIVES = Path(__file__).parent / "connectors"
FAMILIES, PROMPTS, LIMIT_S = ("llama", "gemma3", "falcon_h1"), 3, 1800
NO_CACHE, PEER = "none", "peer"
HEADS = ("prompt", "over", "saving", "resumed", "x", "CPU", "tokens found", "MiB", "answers")
WORDS = ("prompt", "over", "answers")

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


ENGINES = {
    "vllm": Engine(
        "vLLM", "vllm_life.py", ".venv-vllm", "tests/vllm/install.sh", FAMILIES,
        {"stepwell": "StepwellConnector", PEER: "its OffloadingConnector, with files"},
    ),
    "sglang": Engine(
        "SGLang", "sglang_life.py", ".venv-sglang", "make bench-tree-peer", ("llama",),
        {"stepwell": "StepwellHiCache", "linker": "StepwellLinker", PEER: "its file backend"},
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES, help="(default: all)")
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES, help="(default: all)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192], help="lengths of prompts (default: %(default)s)")
    args = parser.parse_args()
    console, started = Console(width=150), time.monotonic()
    found: Report = {"machine": machine()}
    for name in args.engines:
        found[name] = measure(ENGINES[name], console, args.families, args.tokens)
    found["machine"]["load_after"] = os.getloadavg()
    write(ROOT / "bench-connectors.json", found)
    console.print(f"{time.monotonic() - started:.0f} s; written to bench-connectors.json")


def measure(engine: Engine, console: Console, families: list[str], lengths: list[int]) -> list[Report]:
    if not engine.python.exists():
        console.print(f"{engine.name} is not installed in {engine.venv}, and left out: `{engine.install}` installs it")
        return []
    rows = []
    for family in [each for each in engine.families if each in families]:
        for tokens in lengths:
            console.print(f"{engine.name}, {family}, {tokens:,} tokens: {1 + 2 * len(engine.caches)} engines, one by one ...")
            rows.append(row(engine, family, tokens))
            console.print(table(engine, rows[-1]))
    return rows


def row(engine: Engine, family: str, tokens: int) -> Report:
    """What each life reported, or why it could not."""
    found: Report = {"engine": engine.name, "family": family, "tokens": tokens, "prompts": PROMPTS}
    with TemporaryDirectory(prefix="bench-connectors-", dir=ROOT) as directory:
        order = {"family": family, "tokens": tokens, "prompts": PROMPTS, "directory": directory}
        found["alone"] = _run(engine, order, NO_CACHE)
        for life in ("saving", "resumed"):
            found[life] = {cache: _run(engine, order, cache) for cache in engine.caches}
    return found


def _run(engine: Engine, order: Report, cache: str) -> Report:
    """Raises RuntimeError for an engine that fails, unless it fails over its own offloading."""
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [str(engine.python), str(LIVES / engine.script), json.dumps(order | {"cache": cache})]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not done.returncode and said:
        report: Report = json.loads(said[-1])
        return report
    if cache != PEER:
        raise RuntimeError(f"{engine.name} over {cache}, {order}: {done.stderr[-2000:]}")
    return {"error": done.stderr[-2000:]}


def table(engine: Engine, found: Report) -> Table:
    title = f"Prompts under {engine.name}: seconds to the first token, and CPU seconds of resuming"
    made = Table(title=title, title_justify="left")
    for head in HEADS:
        made.add_column(head, justify="left" if head in WORDS else "right")
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


if __name__ == "__main__":
    sys.exit(main())
