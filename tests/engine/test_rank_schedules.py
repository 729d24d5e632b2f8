"""Whatever happens to a rank, at whatever moment, nothing hangs and nothing wrong is said. `make test-ranks` plays 500 schedules.

STEPWELL_SCHEDULES says which seeds: `500` for the first 500, `37:38` for one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.rank_schedules import BLOCK, FAMILIES, Schedule, World

pytest.importorskip("transformers")

FEW = "12"
log = logging.getLogger(__name__)


def seeds() -> range:
    first, _, stop = os.environ.get("STEPWELL_SCHEDULES", FEW).rpartition(":")
    return range(int(first or 0), int(stop))


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """The world of a family. One that something went wrong in is not used again."""
    root: Path = tmp_path_factory.mktemp("models")
    worlds: list[World] = []

    def find(family: str) -> World:
        if not worlds or worlds[0].family != family or worlds[0].spoilt:
            while worlds:
                worlds.pop().close()
            worlds.append(World(family, root))
        return worlds[0]

    yield find
    while worlds:
        worlds.pop().close()


@pytest.mark.parametrize("seed", seeds())
def test_requests_finish_as_on_one_rank_or_name_the_rank_whatever_happens(seed: int, world_of: Callable[[str], World]) -> None:
    world = world_of(FAMILIES[seed // BLOCK % len(FAMILIES)])
    world.spoilt = True
    log.info("%d: %s", seed, world.run(Schedule.of(seed)))  # shown with --log-cli-level=INFO
    world.spoilt = False
