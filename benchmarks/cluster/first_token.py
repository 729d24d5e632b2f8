"""The first token of a long prompt on a decode server: handed over by a prefill server, beside computed by itself."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from stepwell.cli.demo.server import Server, fetch, serving

MEMORY = ("--device-memory", "512MiB", "--host-memory", "512MiB")
TOKEN = ("--peer-token", "a-token-for-both-of-them")
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def run(*, model: str, tokens: int, rounds: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="bench-cluster-") as directory:
        common = ["--model", model, "--served-model-name", "bench", *MEMORY, *TOKEN]
        with serving([*common, "--role", "prefill"], Path(directory, "prefill.log")) as prefill:
            decode = ["--role", "decode", "--peer", prefill.address.removeprefix("http://"), "--prefetch-policy", "wait_complete"]
            with serving([*common, *decode], Path(directory, "decode.log")) as server:
                _measure(prefill, server, 256)  # opens the lane
                rows = [_measure(prefill, server, tokens) for _ in range(rounds)]
    seconds = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "model": model, "tokens": tokens, **seconds,
        "handed over, of computed": seconds["handed over s"] / seconds["computed s"],
    }  # fmt: skip


def _measure(prefill: Server, decode: Server, tokens: int) -> dict[str, float]:
    """Seconds of one prompt that nobody has seen."""
    prompt = [Random().randrange(1, 200) for _ in range(tokens)]
    computed_s, computed = _timed(decode, prompt, cache_salt="computed here")
    prefill_s, done = _timed(prefill, prompt, kv_transfer_params=ASKED)
    handed_s, handed = _timed(decode, prompt, kv_transfer_params=done["kv_transfer_params"])
    details = handed["usage"]["prompt_tokens_details"]
    assert details["store_tokens"] > 0.9 * tokens or tokens < 1024, f"not handed over: {details}"
    assert handed["choices"][0]["text"] == computed["choices"][0]["text"], "another first token"
    return {"computed s": computed_s, "prefill server s": prefill_s, "handed over s": handed_s}


def _timed(server: Server, prompt: list[int], **more: Any) -> tuple[float, dict[str, Any]]:
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    started = time.perf_counter()
    answer = fetch(f"{server.address}/v1/completions", body)
    return time.perf_counter() - started, answer
