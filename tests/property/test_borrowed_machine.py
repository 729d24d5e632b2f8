"""The same random lives under an engine that owns its device memory: the host is the only tier, every page goes by copy."""

from __future__ import annotations

import os

import pytest
from borrowed_world import BorrowedWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from lives import live
from test_cache_machine import CacheMachine, Prompt, prompts
from toy_models import Setup, make_borrowed_setup
from traffic import Traffic


@st.composite
def borrowed_setups(draw: st.DrawFn) -> Setup:
    return make_borrowed_setup(lambda options: draw(st.sampled_from(options)))


class BorrowedMachine(CacheMachine):
    """Acquires load into the engine's pages, and commits copy out of them."""

    @initialize(setup=borrowed_setups(), warm=st.lists(prompts, min_size=2, max_size=5))
    def build(self, setup: Setup, warm: list[Prompt]) -> None:
        self.traffic = Traffic(BorrowedWorld(setup))
        for each in warm:
            self.traffic.serve(self.tokens(each), 0)


class TestBorrowedMachine(BorrowedMachine.TestCase):
    settings = settings(max_examples=max(settings.default.max_examples // 2, 1))


@pytest.mark.parametrize("seed", range(int(os.environ.get("STEPWELL_EXAMPLES", "40"))))
def test_a_long_life_under_a_borrowed_device_claims_only_what_exists(seed: int) -> None:
    live(seed, steps=100, external=True)
