"""Tokens of answers are committed one by one; most of them fill a page and change nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import LeaseState
from stepwell.tiers import publish
from toys import ALL_MODELS, NO_INTERVALS, PAGE, Rig, text


def grown(spec: str, tokens: int) -> list[object]:
    """An answer, token by token: what its lease holds, and what the tiers hold, after each."""
    placement = replace(NO_INTERVALS, decode_interval_tokens=2 * PAGE)
    rig, prompt, seen = Rig(ALL_MODELS[spec], device_pages=96, host_pages=96, placement=placement), text(1, 9), []
    lease = rig.ready(prompt)
    rig.cache.grow(lease, len(prompt))
    rig.cache.commit(lease, len(prompt))
    rig.settle()
    for at in range(len(prompt), len(prompt) + tokens):
        rig.cache.append(lease, [7])
        rig.cache.grow(lease, at + 1)
        rig.cache.commit(lease, at + 1)
        while lease.state is LeaseState.LOADING:
            rig.settle()
        held = lease.position, lease.first_window, *(tuple(ids) for ids in (lease.prefix_pages, lease.window_pages))
        seen.append((held, len(lease.point_pages), rig.cache.stats().tiers))
        rig.cache.audit()
    rig.cache.release(lease)
    rig.idle_check()
    return [*seen, rig.restore([*prompt, *[7] * tokens])]


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_what_is_offered_and_given_back_is_the_same_as_if_every_commit_looked(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = grown(spec, 9 * PAGE + 3)
    monkeypatch.setattr(publish, "_quiet_until", lambda *_: 0)
    assert short == grown(spec, 9 * PAGE + 3)


def test_most_commits_of_an_answer_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, commit = [], publish.commit
    monkeypatch.setattr(publish, "commit", lambda *given, **more: (looked.append(given), commit(*given, **more)))
    grown("full", 8 * PAGE)
    assert len(looked) <= 2 * 9 + 1  # where a page ends, where the next begins, and the prompt's
