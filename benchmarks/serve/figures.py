"""From what clients heard to the figures of one case: how much, how soon, from where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from serve.open_loop import Heard, Played
from serve.streaming import SOURCES

OUTCOMES = ("done", "left", "refused", "failed")
PERCENTILES = (50, 90, 99)
BEHIND_S = 0.05  # of the sending: a twentieth of a second is more than noise of the event loop


def figures(parts: Sequence[Played]) -> dict[str, Any]:
    """Figures of one case under one load. Times in seconds; None where nothing came."""
    heard = [each for part in parts for each in part.heard]
    seconds = sum(part.seconds for part in parts)
    done = [each for each in heard if each.outcome == "done"]
    outcomes = Counter(each.outcome for each in heard)
    prompts = sum(each.prompt_tokens for each in done)
    sources = {source: sum(each.sources[source] for each in done) for source in SOURCES}
    return {
        "seconds": seconds,
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": sum(each.answer_tokens for each in done) / seconds,
        "prompt_tokens_per_s": prompts / seconds,
        "first_token_s": percentiles([each.chunks_s[0] for each in heard if each.chunks_s]),
        "between_tokens_s": percentiles([later - sooner for each in heard for sooner, later in pairwise(each.chunks_s)]),
        "total_s": percentiles([each.ended_s for each in done]),
        "sources": sources,
        "hit_share": 1 - sources["computed"] / prompts if prompts else None,
        "sent_late_s": percentiles([each.late_s for each in heard]),
        "errors": sorted({each.error for each in heard if each.error})[:5],
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """By nearest rank: a measured value."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{share}": ordered[min(-(-len(ordered) * share // 100), len(ordered)) - 1] for share in PERCENTILES}


def fell_behind(found: Mapping[str, Any]) -> float | None:
    """By how much the sending was late, where it was; None where requests went out when they were due."""
    late = found["sent_late_s"]
    return late["p99"] if late is not None and late["p99"] > BEHIND_S else None


def different(cases: Mapping[str, Sequence[Played]]) -> list[int]:
    """Arrivals whose finished answers are not the same in all cases."""
    texts: dict[int, set[str]] = {}
    for each in (each for parts in cases.values() for part in parts for each in part.heard):
        _add(texts, each)
    return sorted(number for number, found in texts.items() if len(found) > 1)


def _add(texts: dict[int, set[str]], heard: Heard) -> None:
    if heard.outcome == "done":
        texts.setdefault(heard.arrival, set()).add(heard.text)
