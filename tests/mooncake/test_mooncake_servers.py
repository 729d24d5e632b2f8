"""`stepwell serve` twice over one cluster: a second server resumes what the first one computed, in every family, with drafts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers")

from asking import client, complete, stored
from mooncake_cluster import Cluster

from engine.drafted import target, tensors_of
from engine.ranked import write_checkpoint
from engine.worker_engines import folder_of
from stepwell.cli.demo.server import serving

FAMILIES = ["llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4"]
PROMPT = [Random(3).randrange(128) for _ in range(600)]


def answers_of_two(cluster: Cluster, model: Path, folder: Path, *more: str) -> list[dict[str, Any]]:
    """What a server answers that computes the prompt, what it answers once it has it, and what the next server answers."""
    cluster.lend("128mb")
    config = folder / "mooncake.json"
    config.write_text(json.dumps(cluster.options()))
    arguments = [
        "--model", str(model), "--served-model-name", "demo", "--device", "cpu", "--device-memory", "8MiB", "--host-memory",
        "16MiB", "--store", f"mooncake:{config}", "--prefetch-policy", "wait_complete", "--checkpoint-delay", "0", *more,
    ]  # fmt: skip
    found = []
    with ExitStack() as lives:
        for name, times in (("first", 2), ("second", 1)):
            server = lives.enter_context(serving(arguments, folder / f"{name}.log"))
            for _ in range(times):
                with client(server.address) as asked:
                    found.append(complete(asked, PROMPT, 12, logprobs=1))
                server.wait_until_stored()
    return found


def must_be_shared(found: list[dict[str, Any]]) -> None:
    computed, warm, second = found
    assert stored(computed) == stored(warm) == 0 and stored(second) > len(PROMPT) // 2, second["usage"]
    assert second["choices"] == warm["choices"], "logprobs to the last digit"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_server_resumes_from_the_cluster_with_the_answer_of_the_first(
    cluster: Cluster, family: str, tmp_path: Path
) -> None:
    must_be_shared(answers_of_two(cluster, folder_of(family, tmp_path), tmp_path))


def test_drafts_guess_on_the_second_server_as_on_the_first(cluster: Cluster, tmp_path: Path) -> None:
    made = target("deepseek_v3", own_layer=True)
    model = write_checkpoint(tmp_path / "drafted", made.config, tensors_of(made))
    found = answers_of_two(cluster, model, tmp_path, "--draft", "mtp")
    must_be_shared(found)
    guessed = [each["usage"]["completion_tokens_details"] for each in found[1:]]
    assert guessed[0] == guessed[1] and guessed[0]["accepted_prediction_tokens"] > 0
