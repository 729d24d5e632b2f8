"""Starts programs with vLLM engines in them and reads what they report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent.parent / "benchmarks" / "connectors"  # with vLLM's own offloading where there is no GPU
TIMEOUT_S = 900.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
# Where a CPU's scan leaves states: at the ends of chunks that are as long as a block.
RECURRENT = {"block_size": 64, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
LLM = {"llama": {}, "gemma3": {}, "gptoss": {}, "phi3": {}, "falconh1": RECURRENT}

Report = dict[str, Any]


def life(model: Path, rounds: list[list[Any]], *, kv: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """One engine. Prompts are lists of tokens, or such with a salt: `{"tokens": ..., "salt": ...}`."""
    asked = [[each if isinstance(each, dict) else {"tokens": each} for each in prompts] for prompts in rounds]
    more["llm"] = LLM[model.name] | more.get("llm", {})
    return {"model": str(model), "rounds": asked, "kv": kv} | more


def stepwell(store: Path | None = None, *, module: str | None = None, **extra: Any) -> dict[str, Any]:
    """Settings of the connector."""
    settings: dict[str, Any] = {"host_memory": "64MiB", "audit": True} | extra
    if store is not None:
        settings |= {"store": f"log:{store}", "store_budget": "1GiB", "prefetch": "wait_complete"}
    named = {"kv_connector_module_path": module} if module is not None else {}
    return {"kv_connector_extra_config": settings} | named


def offloading(store: Path, **extra: Any) -> dict[str, Any]:
    """Settings of vLLM's own offloading, on a CPU, with Stepwell's store beneath its host tier."""
    tier = {"type": "StepwellTier", "module_path": "stepwell.connectors.vllm", "store": f"log:{store}", "store_budget": "1GiB"}
    spec = {"spec_name": "OffloadOnCpu", "spec_module_path": "vllm_offload_on_cpu", "cpu_bytes_to_use": 64 << 20}
    settings = spec | {"secondary_tiers": [tier | extra]}
    return {"kv_connector": "StepwellOffloadingConnector", "kv_connector_extra_config": settings}


def run(*lives: dict[str, Any], **environment: str) -> list[Report]:
    """Runs engines one after the other in one new process."""
    ended = ran(*lives, **environment)
    found = [line for line in ended.stdout.splitlines() if line.startswith("REPORT ")]
    assert ended.returncode == 0 and found, f"it ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
    reports: list[Report] = json.loads(found[-1].removeprefix("REPORT "))
    return reports


def run_to_its_death(*lives: dict[str, Any], **environment: str) -> None:
    """The same for a process that is killed on its way."""
    ended = ran(*lives, **environment)
    assert ended.returncode == -signal.SIGKILL, f"it ended with {ended.returncode}:\n{ended.stderr[-6000:]}"


def ran(*lives: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    """The same for a process that may end in any way."""
    variables = os.environ | ENVIRONMENT | environment
    paths = [str(HERE), str(BENCHMARKS), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(paths).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, str(HERE / "engine_lives.py")], input=json.dumps(lives), env=variables, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=count)


def answers(report: Report) -> list[tuple[list[int], float]]:
    """Every answer of a life, with its logprob to five digits."""
    return [(each["tokens"], round(each["logprob"], 5)) for part in report["rounds"] for each in part["answers"]]


def scheduled(report: Report) -> list[int]:
    """How many tokens each round computed."""
    return [part["scheduled"] for part in report["rounds"]]
