"""Two engines over one cluster: what one computed the other resumes, with the bits of one engine, drafts included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest

pytest.importorskip("transformers")

from handed import WAIT
from mooncake_cluster import Cluster

from engine.drafted import OWN, engine_for, prompts
from parity.recorded import PAGE, Played, Recorded, distance, same_bits
from stepwell.engine import Engine, GenerateRequest, Sampling
from waiting import run_to_the_end, settle

FAMILIES = ["llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def attach(engine: Engine, cluster: Cluster) -> None:
    engine.cache.store.attach(cluster.open(), WAIT)


def recorded_over(stack: ExitStack, cluster: Cluster, family: str) -> Recorded:
    recorded = Recorded(family)
    stack.callback(recorded.close)
    attach(recorded.engine, cluster)
    return recorded


def on_one_engine(family: str, prompt: list[int]) -> Played:
    recorded = Recorded(family)
    recorded.play(prompt)
    played = recorded.play(prompt)
    recorded.close()
    return played


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_one_engine(stack: ExitStack, cluster: Cluster, family: str) -> None:
    prompt = [Random(3).randrange(128) for _ in range(9 * PAGE + 5)]
    one = on_one_engine(family, prompt)
    cluster.lend("128mb")
    first, second = (recorded_over(stack, cluster, family) for _ in range(2))
    first.play(prompt)
    first.settle()
    played = second.play(prompt)
    assert played.stored == played.resumed == one.resumed > 0
    assert same_bits(played, one), f"differs by {distance(played, one)}"


def test_drafts_are_shared_too(stack: ExitStack, cluster: Cluster) -> None:
    (prompt,) = prompts((6 * PAGE + 3,))

    def answer(engine: Engine) -> tuple[list[int], int, int]:
        engine.submit(GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=12)))
        deltas = run_to_the_end(engine)
        usage = next(delta.usage for delta in deltas if delta.usage is not None)
        return [token for delta in deltas for token in delta.tokens], usage.accepted_tokens, usage.sources.store

    with engine_for("deepseek_v3", OWN) as alone:
        answer(alone)
        tokens, accepted, _ = answer(alone)
    cluster.lend("128mb")
    first, second = (stack.enter_context(engine_for("deepseek_v3", OWN)) for _ in range(2))
    for engine in (first, second):
        attach(engine, cluster)
    answer(first)
    settle(first.cache)
    assert answer(second) == (tokens, accepted, 6 * PAGE) and accepted, "drafts guess as well as where the prompt was computed"
