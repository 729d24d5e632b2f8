"""Real weights on long real text: every answer from a warm cache is the cold one, and every tier gives the device's bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parity.recorded import Played, Recorded, distance, same_bits, store_at
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.checkpoint import Checkpoint, open_checkpoint
from stepwell.policy.placement import PlacementRules

DOCUMENTS = Path(__file__).parents[2] / "docs"
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
TURNS = (1200, 1330, 1500)  # tokens of the text so far
ANSWER = 12


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma-3-270m"])
def model(request: pytest.FixtureRequest) -> Checkpoint:
    try:
        return open_checkpoint(request.param)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompts(model: Checkpoint) -> list[list[int]]:
    """A text that grows by turns, and a branch off its middle."""
    assert model.text is not None
    tokens = model.text.encode((DOCUMENTS / "architecture.md").read_text())
    branch = tokens[:1290] + model.text.encode(" What does this mean for the reader?", special=False)
    return [*(tokens[:count] for count in TURNS), branch]


def recorded(model: Checkpoint, **more: object) -> Recorded:
    settings = {
        "page_tokens": 64, "device_memory": "256MiB", "host_memory": "384MiB", "chunk_tokens": 512,
        "placement": PlacementRules(interval_tokens=512, most_added=None, at_branch=False),
    }  # fmt: skip
    return Recorded(model, **(settings | more))


@pytest.fixture(scope="module")
def resident(model: Checkpoint, prompts: list[list[int]]) -> list[Played]:
    engine = recorded(model)
    played = [engine.play(prompt, answer=ANSWER) for prompt in prompts]
    engine.close()
    assert [each.resumed > 1000 for each in played] == [False, True, True, True]
    return played


def test_cold_answers_are_the_warm_ones(model: Checkpoint, resident: list[Played]) -> None:
    engine = recorded(model)
    for then in resident[1:]:
        cold = engine.play(then.prompt, use_cache=False, answer=ANSWER)
        assert cold.resumed == 0 and cold.tokens == then.tokens
        scale = float(cold.logits[0].std())
        assert distance(cold, then) <= 1e-4 * max(scale, 1), f"{distance(cold, then)} with logits of {scale}"
    engine.close()


def lives(model: Checkpoint, kind: str, directory: Path, prompts: list[list[int]]) -> Iterator[Played]:
    """The prompts again, with only one tier to resume from each time."""
    store = {**store_at(directory / "log", "1GiB"), "store_config": WAIT} if kind != "host" else {}
    engine = recorded(model, **store)
    for prompt in prompts:
        yield engine.play(prompt, answer=ANSWER)
        if kind == "host":
            engine.evict_to_host()
        elif kind == "store":
            engine.forget_memory()
        else:
            engine.close()
            engine = recorded(model, **store)
    engine.close()


@pytest.mark.parametrize("kind", ["host", "store", "restart"])
def test_every_tier_gives_the_bits_of_the_device(
    model: Checkpoint, kind: str, prompts: list[list[int]], resident: list[Played], tmp_path: Path
) -> None:
    for now, then in zip(lives(model, kind, tmp_path, prompts), resident, strict=True):
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        assert same_bits(now, then), f"differs by {distance(now, then)}"
        if then.resumed:
            assert (now.host if kind == "host" else now.stored) > 1000
