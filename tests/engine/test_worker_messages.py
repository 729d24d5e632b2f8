"""What the scheduler tells workers arrives as it was meant, and what cannot be meant is refused before anything is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.engine.ops.drawing import Draw
from stepwell.engine.ops.editing import Edit
from stepwell.engine.passes.batch import RequestRows
from stepwell.engine.request import TokenLogprob
from stepwell.engine.sampling import Choosing, Chosen
from stepwell.engine.workers.messages import (
    Pass,
    pack_chosen,
    pack_pass,
    pack_plan,
    read_chosen,
    read_kernels,
    read_pass,
    read_plan,
)  # fmt: skip
from stepwell.jobs.channel import Message, packed, unpacked

PAGES = {Kind.PREFIX: 10, Kind.WINDOW: 6, Kind.POINT: 4}
KNOWN: dict[str, Any] = {"pages": PAGES, "vocab_size": 100, "most_slots": 8}


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def sent(message: Message) -> Message:
    return unpacked(packed(message)[4:])


def rows(**more: Any) -> RequestRows:
    given: dict[str, Any] = {
        "tokens": [5, 99, 0], "position": 32, "prefix_pages": ids(9, 0, 3), "window_pages": ids(5, 1), "first_window": 1,
        "point_page": 3, "slot": 7, "resumes": True, "num_logits": 1, "picks_from": 12, "point_copy": 2,
    } | more  # fmt: skip
    return RequestRows(**given)


def test_a_pass_arrives_as_it_was_sent() -> None:
    edit = Edit(
        biased=ids(1, 99), biases=np.array([-100.0, 0.5]), repeated=ids(3), repetition=1.2, used=ids(0, 2),
        penalties=np.array([0.25, 2.0]), forbidden=ids(98), allowed=ids(-1, 5, 0, 1), within=0.75,
    )  # fmt: skip
    draw = Draw(temperature=0.7, top_k=None, top_p=0.9, number=0.25)
    bare = RequestRows(tokens=(1,), position=0, prefix_pages=ids(4))
    given = Pass(
        rows=[bare, rows(num_logits=0), rows()], choosing=[Choosing(), Choosing(draw=draw, edit=edit, given=7, logprobs=3)]
    )
    found = read_pass(sent(pack_pass(given, 1)), **KNOWN)
    for one, other in zip(found.choosing, given.choosing, strict=True):
        assert (one.draw, one.given, one.logprobs) == (other.draw, other.given, other.logprobs)
    read = found.choosing[1].edit
    assert found.choosing[0].edit is None and read is not None
    for name in Edit.__dataclass_fields__:
        one, other = getattr(read, name), getattr(edit, name)
        assert np.array_equal(one, other), name
    for ours, theirs in zip(found.rows, given.rows, strict=True):
        for name in RequestRows.__dataclass_fields__:
            one, other = getattr(ours, name), getattr(theirs, name)
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, name


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [100]}, {"tokens": [-1]}, {"prefix_pages": ids(10)}, {"prefix_pages": ids(-1)}, {"window_pages": ids(6)},
        {"point_page": 4}, {"point_page": -2}, {"point_copy": 4}, {"point_copy": -2}, {"point_page": None},
        {"slot": 8}, {"num_logits": 4}, {"num_logits": -1}, {"position": -1},
        {"first_window": -1}, {"tokens": []},
    ],
)  # fmt: skip
def test_pages_and_tokens_that_are_not_there_are_refused(wrong: dict[str, Any]) -> None:
    message = pack_pass(Pass(rows=[rows(**wrong)], choosing=[Choosing()]), 1)
    with pytest.raises(ValueError, match=r"."):
        read_pass(sent(message), **KNOWN)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forbidden": ids(100)}, {"biased": ids(-1), "biases": np.ones(1)}, {"used": ids(3)}, {"penalties": np.ones(1)},
        {"repeated": ids(2, 100)}, {"allowed": ids(1, 2, 3)},
    ],
)  # fmt: skip
def test_edits_of_tokens_that_are_not_there_are_refused(wrong: dict[str, Any]) -> None:
    message = pack_pass(Pass(rows=[rows()], choosing=[Choosing(edit=Edit(**wrong))]), 1)
    with pytest.raises(ValueError, match="a pass"):
        read_pass(sent(message), **KNOWN)


@pytest.mark.parametrize("given", [-2, 100])
def test_a_given_token_that_is_not_there_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match="not there"):
        read_pass(sent(pack_pass(Pass(rows=[rows()], choosing=[Choosing(given=given)]), 1)), **KNOWN)


@pytest.mark.parametrize("which", range(8))
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_pass_whose_parts_do_not_fit_is_refused(which: int, change: str) -> None:
    edit = Edit(used=ids(4), penalties=np.ones(1))
    message = pack_pass(Pass(rows=[rows(), rows()], choosing=[Choosing(), Choosing(edit=edit)]), 1)
    arrays = [each.copy() for each in message.arrays]
    arrays[which] = arrays[which][:-1] if change == "shorter" else np.concatenate([arrays[which], arrays[which][:1]])
    with pytest.raises(ValueError, match="pass"):
        read_pass(Message(kind="run", arrays=arrays), **KNOWN)
    with pytest.raises(ValueError, match="arrays"):
        read_pass(Message(kind="run", arrays=arrays[:which]), **KNOWN)


def test_what_was_chosen_arrives_with_its_logprobs() -> None:
    logprob = TokenLogprob(token=4, logprob=-0.5, rank=7, top=((4, -0.5), (7, -2.0)))
    chosen = [Chosen(token=3), None, Chosen(token=4, logprob=logprob), Chosen(token=4, logprob=replace(logprob, top=()))]
    assert read_chosen(sent(pack_chosen(chosen, 1)), vocab_size=8) == chosen
    message = pack_chosen(chosen, 1)
    with pytest.raises(ValueError, match="not of one length"):
        read_chosen(Message(kind="chosen", arrays=[message.arrays[0][:-1], *message.arrays[1:]]), vocab_size=8)


@pytest.mark.parametrize(
    ("which", "wrong"),
    [
        (0, ids(8)), (0, ids(-2)), (0, ids(2**31 - 1)), (0, np.array([3.0])), (0, np.array([3], np.int64)),
        (1, ids(0)), (2, ids(-1)), (2, ids(9)), (2, np.array([1.0])), (3, ids(-1)), (3, np.array([2.0])), (4, ids(4, 8)),
        (4, ids(4, -1)), (4, np.array([4.0, 7.0])), (5, ids(0, 1)),
    ],
)  # fmt: skip
def test_tokens_that_no_model_can_choose_are_refused(which: int, wrong: Any) -> None:
    chosen = Chosen(token=4, logprob=TokenLogprob(token=4, logprob=-0.5, rank=1, top=((4, -0.5), (7, -2.0))))
    arrays = list(pack_chosen([chosen], 1).arrays)
    arrays[which] = wrong
    with pytest.raises(ValueError, match=r"."):
        read_chosen(Message(kind="chosen", arrays=arrays), vocab_size=8)


@pytest.mark.parametrize("said", [3, ["attend"], {"attend": 3}])
def test_words_on_kernels_are_words(said: Any) -> None:
    with pytest.raises(ValueError, match="no words"):
        read_kernels(Message(kind="loaded", fields={"kernels": said}), "kernels")


def plan(source: Span, target: Span) -> Plan:
    return Plan(job=JobId(7), purpose=Purpose.LOAD, copies=(Copy(source=source, target=target),), awaited=True)


def span(tier: Tier, kind: Kind, *pages: int) -> Span:
    return Span(tier=tier, kind=kind, ids=ids(*pages))


def test_a_plan_arrives_as_it_was_sent() -> None:
    given = plan(span(Tier.HOST, Kind.WINDOW, 3, 1), span(Tier.DEVICE, Kind.WINDOW, 0, 5))
    found = read_plan(sent(pack_plan(given)), pages={Tier.DEVICE: PAGES, Tier.HOST: PAGES})
    assert (found.job, found.purpose, found.awaited) == (7, Purpose.LOAD, True)
    (copy,) = found.copies
    assert (copy.source.tier, copy.target.tier, copy.source.kind) == (Tier.HOST, Tier.DEVICE, Kind.WINDOW)
    assert (copy.source.ids.tolist(), copy.target.ids.tolist()) == ([3, 1], [0, 5])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (span(Tier.HOST, Kind.WINDOW, 6), span(Tier.DEVICE, Kind.WINDOW, 0)),
        (span(Tier.HOST, Kind.WINDOW, 0), span(Tier.DEVICE, Kind.WINDOW, -1)),
        (span(Tier.HOST, Kind.WINDOW, 0), span(Tier.HOST, Kind.WINDOW, 1)),
        (span(Tier.ENGINE, Kind.WINDOW, 0), span(Tier.DEVICE, Kind.WINDOW, 1)),
        (span(Tier.DEVICE, Kind.ROWS, 0), span(Tier.DEVICE, Kind.ROWS, 1)),
    ],
)
def test_copies_that_no_rank_can_make_are_refused(source: Span, target: Span) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_plan(sent(pack_plan(plan(source, target))), pages={Tier.DEVICE: PAGES, Tier.HOST: PAGES})


@pytest.mark.parametrize("fields", [{}, {"copies": [1]}, {"copies": [[0, 1]]}, {"copies": [[0, 9, 0]]}, {"copies": "x"}])
def test_plans_that_say_something_else_are_refused(fields: dict[str, Any]) -> None:
    arrays = [ids(0), ids(1)]
    with pytest.raises(ValueError, match=r"."):
        read_plan(Message(kind="copy", fields={"job": 1, "purpose": "load", **fields}, arrays=arrays), pages={Tier.DEVICE: PAGES})
