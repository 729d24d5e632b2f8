"""vLLM on a GPU with StepwellConnector: answers compared with an engine without a cache, from host memory and from the log.

    make test-engines-gpu                          where vLLM is installed for PYTHON
    make test-engines-gpu PARTS=DIR                packages from folders or archives in DIR (docs/vllm.md)
    ... ARGS="--families llama mla --lengths 8192 --out FILE"

For each family: an engine without a cache (cold, again, and again with vLLM's own prefix cache: the engine's own noise), one with
the connector (cold, from host memory), and the same in a new process (from the log, then from host memory). An answer passes when
its log probabilities differ from those of the first no more than the engine's own do, up to the first token that differs. `exact`
counts answers that are equal, number for number, to those that vLLM gave from its own prefix cache. With --talks, conversations
that branch run at once on a small pool, with cancels, and the cache is audited after every step. Status 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from engines_gpu.parts import paths_of

HERE = Path(__file__).parent
LIVES = HERE / "engines_gpu"
ROOT = HERE.parent
FAMILIES = ("llama", "gemma3", "gptoss", "falconh1", "qwen3next", "mla")
NEEDED = {"qwen3next": {"gdn_prefill_backend": "triton"}}  # others of its kernels import packages that vLLM does not need itself
MINE = ("cold", "again", "device")  # rounds of the engine without a cache
IGNORED = ("between",)
GIB = 1 << 30
LEAST_NOISE = 1e-5

Fact = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One engine's life."""

    label: str
    cache: str
    rounds: tuple[str, ...]
    talks: bool = False
    keeps_store: bool = False  # over the store of the life before


@dataclass(slots=True)
class Process:
    """A life in progress: it imports at once, and runs when `play` starts it."""

    plan: Plan
    popen: subprocess.Popen[str]
    log: Path
    facts: list[Fact] = field(default_factory=list)


def plans(args: argparse.Namespace) -> list[Plan]:
    found = [Plan(label="none", cache="none", rounds=MINE, talks=args.talks)]
    if "stepwell" in args.caches:
        found += [
            Plan(label="stepwell-1", cache="stepwell", rounds=("cold", "host"), talks=args.talks),
            Plan(label="stepwell-2", cache="stepwell", rounds=("store", "host"), keeps_store=True),
        ]
    if "offload" in args.caches:
        found.append(Plan(label="offload", cache="offload", rounds=("cold", "host")))
    return found


def begin(plan: Plan, name: str, args: argparse.Namespace, environment: dict[str, str]) -> Process:
    family, _, backend = name.partition("@")
    root = Path(args.root)
    store = root / f"store-{name}"
    more: Fact = NEEDED.get(family, {}) | ({"attention_backend": backend} if backend else {}) | json.loads(args.llm)
    if plan.talks and plan.cache != "none" and args.pool_blocks:
        more |= {"num_gpu_blocks_override": args.pool_blocks}
    order = {
        "model": str(root / "models" / family), "cache": plan.cache, "rounds": plan.rounds, "talks": plan.talks,
        "store": str(store), "lengths": args.lengths, "prompts": args.prompts, "max_tokens": args.max_tokens, "chunk": args.chunk,
        "kv_bytes": int(args.kv_gib * GIB), "host_bytes": int(args.host_gib * GIB), "eager": args.eager, "audit": plan.talks,
        "settle_s": args.settle_s, "llm": more,
    }  # fmt: skip
    if plan.cache == "stepwell" and not plan.keeps_store:
        shutil.rmtree(store, ignore_errors=True)
    log = root / f"{name}-{plan.label}.log"
    popen = subprocess.Popen(
        [sys.executable, str(LIVES / "vllm_life.py"), json.dumps(order)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log.open("w"), text=True, start_new_session=True, env=environment,
    )  # fmt: skip
    return Process(plan, popen, log)


def play(life: Process, limit_s: float) -> None:
    """Runs a life to its end or its limit, and collects what it says. Its whole process group is ended after it."""
    assert life.popen.stdin is not None and life.popen.stdout is not None
    timer = threading.Timer(limit_s, _end, [life.popen])
    timer.start()
    try:
        life.popen.stdin.write("go\n")
        life.popen.stdin.close()
        began = time.monotonic()
        _read(life.popen.stdout, life.facts)
        code = life.popen.wait()
    finally:
        timer.cancel()
        _end(life.popen)
    if code or not any(fact["what"] == "ended" for fact in life.facts):
        late = time.monotonic() - began >= limit_s
        said = life.log.read_text(errors="replace")[-4000:]
        life.facts.append({"what": "failed", "code": "limit" if late else code, "log": said})


def _read(lines: TextIO, facts: list[Fact]) -> None:
    for line in lines:  # one by one: what a life said before it was ended is kept
        facts += [json.loads(line)] if line.startswith("{") else []


def _end(popen: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)


def answers(facts: Iterable[Fact], *rounds: str) -> dict[tuple[str, str], Fact]:
    found = [fact for fact in facts if fact["what"] == "answer" and fact["round"] not in IGNORED]
    return {(fact["round"], fact["prompt"]): fact for fact in found if not rounds or fact["round"] in rounds}


def difference(one: Fact, other: Fact) -> float:
    """The largest of log probabilities, up to and with the first token that differs: behind it both say other things."""
    pairs = list(zip(one["answer"], other["answer"], one["logprobs"], other["logprobs"], strict=True))
    same = next((at for at, (mine, yours, _, _) in enumerate(pairs) if mine != yours), len(pairs))
    return max(abs(mine - yours) for _, _, mine, yours in pairs[: same + 1])


def rows_of(reference: Sequence[Fact], life: Process) -> list[Fact]:
    """Each round of a life compared with the engine without a cache."""
    cold, device, own = answers(reference, "cold"), answers(reference, "device"), answers(reference, *MINE)
    talk = answers(reference, "talk")
    noise = max([difference(fact, cold["cold", prompt]) for (_, prompt), fact in own.items()], default=0.0)
    rows = []
    for name in dict.fromkeys(round_name for round_name, _ in answers(life.facts)):
        mine = answers(life.facts, name)
        wanted = talk if name == "talk" else {(name, prompt): fact for (_, prompt), fact in cold.items()}
        pairs = [(fact, wanted[key]) for key, fact in mine.items() if key in wanted]
        worst = max((difference(fact, other) for fact, other in pairs), default=0.0)
        rows.append({
            "life": life.plan.label, "round": name, "prompts": len(mine), "tokens": sum(fact["tokens"] for fact in mine.values()),
            "found": sum(fact["found"] or 0 for fact in mine.values()),
            "same_tokens": sum(fact["answer"] == other["answer"] for fact, other in pairs),
            "exact": sum(_is_equal(fact, device.get(("device", prompt))) for (_, prompt), fact in mine.items()),
            "logprob_difference": worst, "noise": noise,
            "passed": worst <= max(noise, LEAST_NOISE) or name in ("talk", *MINE[1:]),
            "ttft_s": {prompt: fact["ttft_s"] for (_, prompt), fact in mine.items()},
        })  # fmt: skip
    return rows


def _is_equal(one: Fact, other: Fact | None) -> bool:
    return other is not None and one["answer"] == other["answer"] and one["logprobs"] == other["logprobs"]


def run_family(name: str, args: argparse.Namespace, environment: dict[str, str]) -> Fact:
    print(f"{time.strftime('%H:%M:%S')} {name}: writing the model, importing vLLM", flush=True)
    subprocess.run(
        [sys.executable, str(LIVES / "models.py"), str(Path(args.root) / "models"), name.partition("@")[0]],
        check=True,
        env=environment,
    )
    lives = [begin(plan, name, args, environment) for plan in plans(args)]
    found: Fact = {"family": name, "rows": [], "failed": [], "backends": []}
    try:
        for life in lives:
            began = time.monotonic()
            play(life, args.life_s)
            rows = rows_of(lives[0].facts, life)
            found["rows"] += rows
            found["failed"] += [{"life": life.plan.label, **fact} for fact in life.facts if fact["what"] == "failed"]
            found["backends"] = sorted({*found["backends"], *_backends(life.log)})
            found |= {key: fact[key] for fact in life.facts if fact["what"] == "engine" for key in ("version", "torch")}
            metrics = [fact["metrics"] for fact in life.facts if fact["what"] == "ended"]
            print(f"{time.strftime('%H:%M:%S')} {name} {life.plan.label}: {time.monotonic() - began:.0f} s {metrics}", flush=True)
            for row in rows:
                print(_line(row), flush=True)
            for fact in found["failed"][-1:]:
                if fact["life"] == life.plan.label:
                    print(f"  FAILED ({fact['code']}): {fact['log'][-1500:]}", flush=True)
    finally:
        for life in lives:
            _end(life.popen)
        shutil.rmtree(Path(args.root) / f"store-{name}", ignore_errors=True)
    return found


def _line(row: Fact) -> str:
    said = "ok" if row["passed"] else "DIFFERENT"
    times = ", ".join(f"{prompt} {1e3 * seconds:.0f}" for prompt, seconds in row["ttft_s"].items() if seconds)
    near = f"logprobs within {row['logprob_difference']:.5f} (noise {row['noise']:.5f}) {said}"
    return (
        f"  {row['life']:11} {row['round']:7} found {row['found']:>7}/{row['tokens']:<7}"
        f" same {row['same_tokens']}/{row['prompts']} exact {row['exact']} {near}  ms: {times}"
    )


def _backends(log: Path) -> set[str]:
    return set(
        re.findall(
            r"[Uu]sing (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+)(?: attention)? backend", log.read_text(errors="replace")
        )
    )


def machine() -> Fact:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        gpu = ""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": gpu or None, "cores": os.cpu_count(), "python": platform.python_version(), "cpu": platform.machine(),
        "commit": commit.stdout.strip() or None, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """Packages of the parts before those of the interpreter, and this checkout's sources before all."""
    names = [args.part, *args.with_parts]
    trees = paths_of(Path(args.parts), Path(args.root) / "packages", names) if args.parts else []
    paths = [str(ROOT / "src"), *map(str, trees), os.environ.get("PYTHONPATH", "")]
    more = {"VLLM_BATCH_INVARIANT": "1"} if args.batch_invariant else {}
    return (
        os.environ | {"PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep), "VLLM_PLUGINS": "", "PYTHONUNBUFFERED": "1"} | more
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="folder with packages; without it vLLM is that of this interpreter")
    parser.add_argument("--part", default="vllm", help="the part that holds the engine (default: %(default)s)")
    parser.add_argument("--with-parts", nargs="*", default=["common"], help="other parts it needs (default: common)")
    parser.add_argument(
        "--families", nargs="+", default=FAMILIES, help=f"of {', '.join(FAMILIES)}, llama8b, tiny; llama@BACKEND too"
    )
    parser.add_argument("--caches", nargs="+", default=["stepwell"], choices=["stepwell", "offload"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192], help="of prompts (default: 8192)")
    parser.add_argument("--prompts", type=int, default=3, help="of each length (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step at most (default: %(default)s)")
    parser.add_argument("--talks", action="store_true", help="conversations at once, on --pool-blocks")
    parser.add_argument("--pool-blocks", type=int, default=0, help="of the engine's pool, so that it preempts (default: as fit)")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--batch-invariant", action="store_true", help="kernels whose results do not depend on the batch")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="the engine's own KV cache (default: %(default)s)")
    parser.add_argument("--host-gib", type=float, default=8.0, help="host tier (default: %(default)s)")
    parser.add_argument("--settle-s", type=float, default=1.5, help="for saves to end (default: %(default)s)")
    parser.add_argument("--life-s", type=float, default=240.0, help="limit of one engine (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=0.0, help="no family is begun after this (default: no limit)")
    parser.add_argument("--root", default="/tmp/test-engines-gpu", help="for models, stores and packages (default: %(default)s)")
    parser.add_argument("--llm", default="{}", help="more arguments of vllm.LLM, in JSON")
    parser.add_argument("--out", default=str(ROOT / "bench-engines-gpu.json"), help="(default: %(default)s)")
    args = parser.parse_args()
    began = time.monotonic()
    Path(args.root).mkdir(parents=True, exist_ok=True)
    environment = environment_of(args)
    found: Fact = {"machine": machine(), "command": sys.argv, "families": [], "left_out": []}
    for name in args.families:
        if args.limit_s and time.monotonic() - began > args.limit_s:
            found["left_out"].append(name)
            continue
        found["families"].append(run_family(name, args, environment))
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    bad = [each["family"] for each in found["families"] if each["failed"] or not all(row["passed"] for row in each["rows"])]
    print(f"{time.monotonic() - began:.0f} s; written to {args.out}")
    print(f"failed: {bad or 'none'}; left out: {found['left_out'] or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
