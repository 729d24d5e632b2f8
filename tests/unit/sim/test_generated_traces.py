"""Generated traces repeat by seed, share what they say they share, and come in order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stepwell.base.errors import ConfigError
from stepwell.sim.describe import describe
from stepwell.sim.generate import KINDS, Shape, generate
from stepwell.sim.hardware import Hardware, hardware_from


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    def made(seed: int) -> list[tuple[float, int, list[int]]]:
        requests = generate(kind, Shape(sessions=10, seed=seed))
        return [(each.at_s, each.prompt_tokens, each.blocks.tolist()) for each in requests]

    assert made(1) == made(1) != made(2)


@pytest.mark.parametrize(("kind", "least"), [("chat", 0.7), ("agents", 0.8), ("rag", 0.4)])
def test_most_of_every_kind_comes_again(kind: str, least: float) -> None:
    requests = generate(kind, Shape(sessions=200))
    assert [each.at_s for each in requests] == sorted(each.at_s for each in requests)
    assert least < describe(requests, block_tokens=64).repeated < 1
    assert all(0 < each.prompt_tokens - 64 * len(each.blocks) < 64 for each in requests)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_blocks_have_equal_history(kind: str) -> None:
    before: dict[int, int] = {}
    for each in generate(kind, Shape(sessions=30)):
        path = [-1, *each.blocks.tolist()]
        assert all(before.setdefault(block, parent) == parent for parent, block in pairwise(path))


def test_shapes_that_cannot_be_are_refused() -> None:
    for changes in ({"sessions": 0}, {"duration_s": 0.0}, {"duration_s": float("nan")}, {"block_tokens": 1}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            Shape(**changes)
    with pytest.raises(ConfigError, match="chat, agents, rag"):
        generate("poems", Shape())


def test_computing_slows_down_with_the_position() -> None:
    hardware = hardware_from(["prefill_tokens_per_s=1000", "prefill_half_tokens=1000"])
    assert hardware.prefill_s(0, 1000) == pytest.approx(1.5)
    assert hardware.prefill_s(1000, 2000) == pytest.approx(2.5)
    assert hardware.prefill_s(0, 1000) + hardware.prefill_s(1000, 2000) == pytest.approx(hardware.prefill_s(0, 2000))
    assert Hardware().load_s(0) == Hardware().fetch_s(0) == 0


@pytest.mark.parametrize(
    "setting", ["speed=1", "store_latency_s", "host_bytes_per_s=0", "host_latency_s=-1", "host_latency_s=nan"]
)
def test_hardware_that_cannot_be_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        hardware_from([setting])
