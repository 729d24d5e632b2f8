"""The recipe of docs/vllm.md for `vllm serve`, as it is written there: a prompt outlives the server, and its API says so."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families
from tiny_vllm_models import make, make_tokenizer
from vllm_engines import ENVIRONMENT, HERE, life, ran, stepwell, text

from stepwell.jobs.children import start_child
from waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
PROMPT, BLOCK = text(1, 300), 32
FOUND = len(PROMPT) // BLOCK * BLOCK
SMALL = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager"]
START_S, ANSWER_S = 900, 300
PREFIX = "vllm:stepwell_"


def recipe(model: Path, store: Path) -> list[str]:
    """The command, for this model and in the size of this machine; requests may ask why."""
    found = re.search(r"^vllm (serve MODEL .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, "the page has no recipe"
    verb, name, option, value = shlex.split(found[1])
    assert (verb, name, option) == ("serve", "MODEL", "--kv-transfer-config")
    config = json.loads(value)
    extra = config["kv_connector_extra_config"]
    assert set(extra) == {"host_memory", "store", "store_budget"} and extra["store"].startswith("log:")
    extra |= {
        "host_memory": "64MiB",
        "store": f"log:{store}",
        "store_budget": "1GiB",
        "explain": True,
        "prefetch": "wait_complete",
    }
    return [verb, str(model), option, json.dumps(config)]


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, model: Path, log: Path) -> None:
        self._process, self._url, self._model, self._log = process, f"http://127.0.0.1:{port}", model, log

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = json.dumps(body).encode() if body is not None else None
        asked = Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        with urlopen(asked, timeout=ANSWER_S) as answer:
            said: str = answer.read().decode()
        return said

    def is_up(self) -> bool:
        assert self._process.poll() is None, f"the server has ended:\n{self._log.read_text()[-4000:]}"
        try:
            self.get("/health")
        except (URLError, ConnectionError):
            return False
        return True

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """The answer, with its log probabilities, and what the connector says of it."""
        body = {
            "model": str(self._model), "prompt": tokens, "max_tokens": 8, "temperature": 0, "logprobs": 0,
            "kv_transfer_params": {"stepwell_explain": True},
        }  # fmt: skip
        said = json.loads(self.get("/v1/completions", body))
        (choice,) = said["choices"]
        logprobs = [round(each, 5) for each in choice["logprobs"]["token_logprobs"]]
        return {"answer": (choice["text"], logprobs), "why": said["kv_transfer_params"]["stepwell"]}

    def metrics(self) -> dict[tuple[str, str], float]:
        """What `/metrics` has of ours, by name and our own label."""
        families = text_string_to_metric_families(self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples if sample.name.startswith(PREFIX)]
        found = {}
        for sample in samples:
            (label,) = sample.labels.keys() - {"engine", "model_name"}
            found[sample.name.removeprefix(PREFIX), sample.labels[label]] = sample.value
        return found


@contextmanager
def served(model: Path, store: Path, log: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "serve_vllm.py"), *recipe(model, store), *SMALL]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    variables = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as output:
        process = start_child([*command, *where], env=variables, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, port, model, log)
    try:
        wait_until(server.is_up, "the server", pause_s=0.5, patience_s=START_S)
        yield server
    finally:
        process.terminate()
        process.wait(ANSWER_S)


def test_the_documented_recipe_resumes_in_a_second_server_which_says_so(tmp_path: Path) -> None:
    model, store = make("llama", tmp_path), tmp_path / "store"
    make_tokenizer(model)
    with served(model, store, tmp_path / "first.log") as server:
        first = server.ask(PROMPT)
        assert (first["why"]["cause"], first["why"]["restore_tokens"]) == ("never_stored", 0)

        def stored() -> bool:
            server.ask(text(2, 5))  # the engine reports what it counted with a step
            return server.metrics().get(("cache_events_total", "backup_pages"), 0) >= FOUND // BLOCK

        wait_until(stored, "the prompt's pages in the store", pause_s=0.1)
        counted = server.metrics()
        assert counted["cache_events_total", "save_pages"] >= FOUND // BLOCK
        assert counted["tier_used_bytes", "host"] > 0 and counted["tier_available_bytes", "host"] > 0
        assert not [key for key in counted if key[0] == "loaded_tokens_total" and counted[key]]
    with served(model, store, tmp_path / "second.log") as server:
        second = server.ask(PROMPT)
        assert second["answer"] == first["answer"]
        assert (second["why"]["cause"], second["why"]["tier"], second["why"]["store_tokens"]) == ("in_store", "store", FOUND)
        counted = server.metrics()
        assert counted["loaded_tokens_total", "store"] == FOUND and counted["cache_events_total", "load_jobs"] == 1
        assert counted["store_state", "attached"] == 1 and counted["store_state", "switched_off"] == 0


def test_settings_that_would_end_requests_with_errors_are_refused_at_the_start(tmp_path: Path) -> None:
    kv = stepwell(tmp_path / "store") | {"kv_load_failure_policy": "fail"}
    ended = ran(life(make("llama", tmp_path), [[PROMPT]], kv=kv))
    assert ended.returncode and 'set it to "recompute" in --kv-transfer-config' in ended.stderr
