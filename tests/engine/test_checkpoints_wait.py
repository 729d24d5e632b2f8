"""A checkpoint never delays a request: copies of point state get pages only once every request of a plan has its own."""

from __future__ import annotations

import pytest

from stepwell.base.config import PlacementConfig
from stepwell.engine.requests.request import GenerateRequest, Request
from stepwell.engine.requests.text import StopFinder
from stepwell.engine.scheduling.scheduler import Limits, Scheduler
from toys import FULL_POINT, Rig, text

EVERY_PAGE = PlacementConfig(interval_tokens=0)
PROMPTS = [15, 15, 16, 16, 16]  # the first token of an answer fills a page, or needs one


def planned(pages: int) -> tuple[list[int], int]:
    """Who is in a plan with the first token of every answer, and how many points its pass copies."""
    rig = Rig(FULL_POINT, device_pages=pages, placement=EVERY_PAGE)
    scheduler = Scheduler(rig.cache, Limits(), rig.clock)
    for number, tokens in enumerate(PROMPTS):
        scheduler.enter(request(rig, number, tokens))
    scheduler.admit()
    for each in scheduler.active.values():
        assert each.lease is not None
        rig.prefill(each.lease)
        each.tokens.append(7)
        rig.cache.append(each.lease, [7])
    chunks = scheduler.plan()
    rig.cache.audit()
    return [chunk.request.id for chunk in chunks], sum(chunk.point_copy is not None for chunk in chunks)


def request(rig: Rig, number: int, tokens: int) -> Request:
    prompt = text(number + 1, tokens)
    return Request(
        id=number, submitted=GenerateRequest(tokens=prompt), namespace=rig.cache.namespace_for(), max_tokens=8,
        stream=None, stops=StopFinder(()), seed=0, ends_on=frozenset(),
        arrived_s=number, entered_s=0, waits_since_s=0, tokens=[*prompt],
    )  # fmt: skip


def test_nobody_loses_their_room_for_a_copy_of_point_state(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = range(15, 40)
    with_copies = [planned(pages) for pages in sizes]
    monkeypatch.setattr("stepwell.tiers.publish.copy_point", lambda *_: None)
    assert [each for each, _ in with_copies] == [planned(pages)[0] for pages in sizes]
    assert {copies for _, copies in with_copies} >= {0, 2}, "some of these sizes have space for copies, and some do not"
