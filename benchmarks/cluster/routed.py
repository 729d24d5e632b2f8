"""Hit tokens on a slice of a trace: three small servers behind smg, by prefix and in turn, beside one server with all the memory.

Requests follow one another as in the trace, without its pauses, in small: eight blocks of the trace are one page of text here.
Blocks are equal where their whole history is, so the last of the eight names the page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepwell.cli.demo.server import fetch, serving
from stepwell.cli.demo_cluster.parts import routing
from stepwell.sim.files import TraceFile

PAGE_TOKENS, BLOCKS = 16, 8  # a token is a byte to the model; blocks of the trace for each page
SERVERS = 3
DEVICE_MIB, HOST_MIB = 9, 9  # of each of them: together about as much as 150 requests of an agentic trace leave
MODEL = ("--model", "random-hybrid", "--served-model-name", "bench", "--page-tokens", str(PAGE_TOKENS), "--max-running", "4")


def run(*, trace: Path, requests: int, smg: str) -> dict[str, Any]:
    prompts = list(islice(_prompts(TraceFile(trace)), requests))
    settings = {
        "one server with all the memory": (1, "passthrough"), "by prefix (cache_aware)": (SERVERS, "cache_aware"),
        "in turn (round_robin)": (SERVERS, "round_robin"),
    }  # fmt: skip
    shares = {name: _hit_share(prompts, smg, count, policy) for name, (count, policy) in settings.items()}
    again = f"{_repeated(prompts):.3f}"
    return {
        "trace": trace.name,
        "requests": len(prompts),
        "tokens": sum(map(len, prompts)),
        "seen before": float(again),
        **shares,
    }


def _hit_share(prompts: Sequence[str], smg: str, count: int, policy: str) -> float:
    """Of all tokens of prompts, those that were not computed."""
    each = SERVERS // count
    memory = ["--device-memory", f"{DEVICE_MIB * each}MiB", "--host-memory", f"{HOST_MIB * each}MiB"]
    cached = 0
    with TemporaryDirectory(prefix="bench-cluster-") as directory, ExitStack() as lives:
        servers = [lives.enter_context(serving([*MODEL, *memory], Path(directory, f"{at}.log"))) for at in range(count)]
        described = [{"url": server.address} for server in servers]
        router = lives.enter_context(routing(smg, described, Path(directory, "smg.log"), "--policy", policy))
        for prompt in prompts:
            body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            cached += fetch(f"{router.address}/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / sum(map(len, prompts))


def _prompts(trace: TraceFile) -> Iterator[str]:
    for request in trace:
        pages = request.blocks[BLOCKS - 1 :: BLOCKS].tolist()
        if pages:
            yield "".join(map(_page, pages))


def _page(block: int) -> str:
    return hashlib.blake2b(str(block).encode(), digest_size=PAGE_TOKENS // 2).hexdigest()


def _repeated(prompts: Sequence[str]) -> float:
    """What endless memory on one server would find, as far as pages go."""
    seen: set[str] = set()
    found = 0
    for prompt in prompts:
        pages = [prompt[: end + PAGE_TOKENS] for end in range(0, len(prompt), PAGE_TOKENS)]
        found += PAGE_TOKENS * sum(page in seen for page in pages)
        seen.update(pages)
    return found / sum(map(len, prompts))
