"""The scheduler's messages arrive at workers unchanged, and a message without a meaning is refused before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.engine.ops.drawing import Draw
from stepwell.engine.ops.editing import Edit
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.requests.request import Sampling, TokenLogprob
from stepwell.engine.sampling.choices import Choosing, Chosen
from stepwell.engine.workers.messages import ChosenTokens, pack_chosen, pack_plan, read_chosen, read_kernels, read_plan
from stepwell.engine.workers.pass_arrays import Pass, PassPacker, PassReader
from stepwell.jobs.channel import Message, packed, unpacked

PAGES = {Kind.PREFIX: 10, Kind.WINDOW: 6, Kind.POINT: 4}


def a_reader() -> PassReader:
    return PassReader(pages=PAGES, vocab_size=100, most_slots=8)


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
    found = a_reader().read(sent(PassPacker().pack(given, 1)))
    ways = found.choosing()
    for one, other in zip(ways, given.choosing, strict=True):
        assert (one.draw, one.given, one.logprobs) == (other.draw, other.given, other.logprobs)
    read = ways[1].edit
    assert ways[0].edit is None and read is not None
    for name in Edit.__dataclass_fields__:
        one, other = getattr(read, name), getattr(edit, name)
        assert np.array_equal(one, other), name
    assert_alike(found.rows, given.rows)


def assert_alike(ours: Sequence[RequestRows], theirs: Sequence[RequestRows]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for name in RequestRows._fields:
            assert np.array_equal(getattr(one, name), getattr(other, name)) or getattr(one, name) == getattr(other, name), name


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
    message = PassPacker().pack(Pass(rows=[rows(**wrong)], choosing=[Choosing()]), 1)
    with pytest.raises(ValueError, match=r"."):
        a_reader().read(sent(message))


@pytest.mark.parametrize(
    "wrong",
    [
        {"forbidden": ids(100)}, {"biased": ids(-1), "biases": np.ones(1)}, {"used": ids(3)}, {"penalties": np.ones(1)},
        {"repeated": ids(2, 100)}, {"allowed": ids(1, 2, 3)},
    ],
)  # fmt: skip
def test_edits_of_tokens_that_are_not_there_are_refused(wrong: dict[str, Any]) -> None:
    message = PassPacker().pack(Pass(rows=[rows()], choosing=[Choosing(edit=Edit(**wrong))]), 1)
    with pytest.raises(ValueError, match="a pass"):
        a_reader().read(sent(message)).choosing()


@pytest.mark.parametrize("given", [-2, 100])
def test_a_given_token_that_is_not_there_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        a_reader().read(sent(PassPacker().pack(Pass(rows=[rows()], choosing=[Choosing(given=given)]), 1))).choosing()


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_pass_whose_parts_do_not_fit_is_refused(which: int, change: str) -> None:
    edit = Edit(used=ids(4), penalties=np.ones(1))
    message = PassPacker().pack(Pass(rows=[rows(), rows()], choosing=[Choosing(), Choosing(edit=edit)]), 1)
    arrays = [each.copy() for each in message.arrays]
    arrays[which] = arrays[which][:-1] if change == "shorter" else np.concatenate([arrays[which], arrays[which][:1]])
    with pytest.raises(ValueError, match="pass"):
        a_reader().read(replace(message, arrays=arrays)).choosing()
    if which != 2:  # a pass without choices at all is one of the likeliest tokens
        with pytest.raises(ValueError, match=r"arrays|kinds"):
            a_reader().read(replace(message, arrays=message.arrays[:which])).choosing()


# ---- one pass behind another ----------------------------------------------------------------------


def a_step(before: RequestRows, token: int, **more: Any) -> RequestRows:
    further = {"tokens": (token,), "position": before.end, "resumes": False, "num_logits": 1, "point_copy": None}
    return before._replace(**(further | more))


def plain(*given: RequestRows) -> Pass:
    return Pass(rows=given, choosing=[Choosing()] * sum(each.num_logits for each in given))


def told_in(message: Message) -> int:
    """How many requests a pass sends whole."""
    return message.numbers[4]


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_steps_tell_whole_only_who_is_new_or_has_other_pages(*, looks_ahead: bool) -> None:
    packer, reader = PassPacker(), a_reader()
    a, b, c = rows(), rows(prefix_pages=ids(1), slot=2), rows(prefix_pages=ids(2, 4), slot=3, num_logits=2)
    later = rows(prefix_pages=ids(7), slot=4)
    passes = [
        (3, plain(a, b, c)),
        (0, plain(a := a_step(a, 1), b := a_step(b, 2), c := a_step(c, 3))),
        (0, plain(a := a_step(a, 4), b := a_step(b, 5, prefix_pages=ids(1, 8)), c := a_step(c, 6))),  # a page begins
        (0, plain(a := a_step(a, 4), b := a_step(b, 5), c := a_step(c, 6, prefix_pages=ids(2, 4, 0)))),
        (1, plain(b := a_step(b, 4, prefix_pages=ids(1, 8, 9)), a := a_step(a, 1), c := a_step(c, 6))),  # moved, and a page
        (1, plain(b := a_step(b, 5, prefix_pages=ids(1, 8, 3, 4)), a := a_step(a, 4), c := a_step(c, 6))),  # two, or others
        (1, plain(c := a_step(c, 7), a := a_step(a, 8), later)),  # one has ended, one is new, and they stand in another order
        (1, plain(a_step(a, 9, point_page=1), a_step(later, 10))),
    ]
    for number, (num_told, given) in enumerate(passes, 1):
        message = sent(packer.pack(given, number))
        assert told_in(message) == num_told
        assert_alike(reader.read(message).rows, given.rows)
        if looks_ahead:
            reader.look_ahead()


@pytest.mark.parametrize(
    "other",
    [
        {"prefix_pages": ids(9, 0, 3)}, {"window_pages": ids(5, 1)}, {"first_window": 0}, {"point_page": None}, {"slot": 1},
        {"picks_from": 0}, {"position": 36}, {"resumes": True}, {"num_logits": 0}, {"tokens": (1, 2)},
        {"point_copy": 1},
    ],
)  # fmt: skip
def test_whatever_differs_from_one_token_further_is_told(other: dict[str, Any]) -> None:
    packer, reader, first = PassPacker(), a_reader(), rows()
    reader.read(sent(packer.pack(plain(first), 1)))
    given = plain(a_step(first, 1)._replace(**other))
    message = sent(packer.pack(given, 2))
    assert told_in(message) == 1
    assert_alike(reader.read(message).rows, given.rows)


def test_nobody_goes_on_from_a_pass_that_was_not_read() -> None:
    packer, reader, first = PassPacker(), a_reader(), rows()
    reader.read(sent(packer.pack(plain(first), 1)))
    missed = plain(second := a_step(first, 1))
    packer.pack(missed, 2)
    with pytest.raises(ValueError, match="continues rows"):
        reader.read(sent(packer.pack(plain(third := a_step(second, 2)), 3)))
    packer.reset()
    given = plain(a_step(third, 3))
    assert_alike(reader.read(sent(packer.pack(given, 4))).rows, given.rows)


def test_nobody_goes_on_from_a_pass_that_was_refused() -> None:
    packer, reader, first = PassPacker(), a_reader(), rows()
    reader.read(sent(packer.pack(plain(first), 1)))
    reader.look_ahead()
    with pytest.raises(ValueError, match="tokens outside the vocabulary"):
        reader.read(sent(packer.pack(plain(second := a_step(first, 100)), 2)))
    with pytest.raises(ValueError, match="continues rows"):
        reader.read(sent(packer.pack(plain(a_step(second, 1)), 3)))


@pytest.mark.parametrize("kept", [[1], [-2], [2**31 - 1]])
def test_rows_that_were_not_in_the_pass_before_are_refused(kept: list[int]) -> None:
    packer, reader, first = PassPacker(), a_reader(), rows()
    reader.read(sent(packer.pack(plain(first), 1)))
    message = packer.pack(plain(a_step(first, 1)), 2)
    with pytest.raises(ValueError, match="continues rows"):
        reader.read(replace(message, numbers=(2, 1, 1, 1, 0, 0), arrays=[ids(*kept, 1), *message.arrays[1:]]))


@pytest.mark.parametrize(
    ("numbers", "ints"),
    [
        ((2, 1, 1, 0, 0, 0), [100]), ((2, 1, 1, 0, 0, 0), [-1]), ((2, 1, 1, 0, 0, 0), [1, 1]), ((2, 1, 1, 0, 0, 0), []),
        ((2, 1, 1, 0, 0, 1), [0, 10, 1]), ((2, 1, 1, 0, 0, 1), [0, -1, 1]), ((2, 1, 1, 0, 0, 1), [1, 1, 1]),
        ((2, 1, 1, 0, 0, 1), [-1, 1, 1]), ((2, 1, 1, 0, 0, 2), [0, 1, 1]), ((2, 1, 2, 0, 0, 0), [1, 1]),
        ((2, 1, 0, 0, 0, 0), []), ((2, 1, 1, 2, 0, 0), [0, 0, 1]), ((2, 1, 1, 0, 1, 0), []), ((2, 1, 1, 1, 0, 0), [-1]),
        ((2, 1, 1, 0, 0), [1]), ((2, 1, 1, 0, 0, -1), [1]), ((2, 1, 1, 0, 0, 2**40), [1]), ((2, 3, 1, 0, 0, 0), [1]),
    ],
)  # fmt: skip
def test_a_step_that_says_what_cannot_be_is_refused(numbers: tuple[int, ...], ints: list[int]) -> None:
    packer, reader, first = PassPacker(), a_reader(), rows()
    reader.read(sent(packer.pack(plain(first), 1)))
    message = packer.pack(plain(a_step(first, 1)), 2)
    assert (message.numbers, message.arrays[0].tolist()) == ((2, 1, 1, 0, 0, 0), [1]), "a token is all that it says"
    with pytest.raises(ValueError, match=r"."):
        reader.read(replace(message, numbers=numbers, arrays=[ids(*ints), *message.arrays[1:]]))


def test_rows_without_pages_are_told_apart_by_where_they_stand() -> None:
    packer, reader, none = PassPacker(), a_reader(), ids()
    a, b, c = (rows(prefix_pages=none, slot=slot, position=8 * slot) for slot in (1, 2, 3))
    passes = [
        (3, plain(a, b, c)), (0, plain(a := a_step(a, 1), b := a_step(b, 2), c := a_step(c, 3))),
        (0, plain(a_step(a, 4), a_step(b, 5))),
    ]  # fmt: skip
    for number, (num_told, given) in enumerate(passes, 1):
        message = sent(packer.pack(given, number))
        assert told_in(message) == num_told
        assert_alike(reader.read(message).rows, given.rows)


def test_pages_that_were_told_are_not_changed_any_more() -> None:
    packer, first = PassPacker(), rows(prefix_pages=ids(1, 2, 3))
    packer.pack(plain(first), 1)
    packer.pack(plain(longer := a_step(first, 1, prefix_pages=ids(1, 2, 3, 4))), 2)
    for each in (first, longer):
        with pytest.raises(ValueError, match="read-only"):
            each.prefix_pages[0] = 4


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_draws_by_what_is_no_number_are_refused(number: float) -> None:
    for name in ("temperature", "top_p", "number"):
        draw = Draw(temperature=0.7, top_k=3, top_p=0.9, number=0.5)._replace(**{name: number})
        message = sent(PassPacker().pack(Pass(rows=[rows()], choosing=[Choosing(draw=draw)]), 1))
        with pytest.raises(ValueError, match="no numbers"):
            a_reader().read(message).choosing()


@pytest.mark.parametrize("draws", [[None, None], [0.25, None], [0.25, 0.5]])
def test_draws_alone_arrive_as_they_were_sent(draws: list[float | None]) -> None:
    choosing = [
        Choosing(draw=None if number is None else Draw(temperature=0.7, top_k=3, top_p=0.9, number=number)) for number in draws
    ]
    message = sent(PassPacker().pack(Pass(rows=[rows(num_logits=2)], choosing=choosing), 1))
    assert a_reader().read(message).choosing() == choosing


def test_more_likeliest_tokens_than_there_are_numbers_for_fail_no_pass() -> None:
    top_k = Sampling(temperature=1, top_k=10**400).top_k
    choosing = [Choosing(draw=Draw(temperature=1.0, top_k=top_k, top_p=1.0, number=0.5))]
    assert a_reader().read(sent(PassPacker().pack(Pass(rows=[rows()], choosing=choosing), 1))).choosing() == choosing


LOGPROB = TokenLogprob(token=4, logprob=-0.5, rank=7, top=((4, -0.5), (7, -2.0)))


def chosen(*arrays: Any) -> Message:
    return sent(Message(kind="chosen", numbers=(1, 0), arrays=arrays))


def test_what_was_chosen_arrives_with_its_logprobs() -> None:
    given = ChosenTokens([3, -1, 4, 4], [None, None, LOGPROB, replace(LOGPROB, top=())])
    arrays = pack_chosen(given)
    found = read_chosen(chosen(*arrays), vocab_size=8)
    assert [found.of(row) for row in range(4)] == [given.of(row) for row in range(4)] and given.of(1) is None
    with pytest.raises(ValueError, match="not of equal length"):
        read_chosen(chosen(arrays[0][:-1], *arrays[1:]), vocab_size=8)


def test_tokens_alone_arrive_as_such() -> None:
    (tokens,) = pack_chosen(ChosenTokens([3, -1, 7]))
    found = read_chosen(chosen(tokens), vocab_size=8)
    assert [found.of(row) for row in range(3)] == [Chosen(token=3), None, Chosen(token=7)] and found.tokens_alone


@pytest.mark.parametrize(
    ("which", "wrong"),
    [
        (0, ids(8)), (0, ids(-2)), (0, ids(2**31 - 1)), (0, np.array([3.0])), (0, np.array([3], np.int64)),
        (1, ids(0)), (2, ids(-1)), (2, ids(9)), (2, np.array([1.0])), (3, ids(-1)), (3, np.array([2.0])), (4, ids(4, 8)),
        (4, ids(4, -1)), (4, np.array([4.0, 7.0])), (5, ids(0, 1)),
    ],
)  # fmt: skip
def test_tokens_that_no_model_can_choose_are_refused(which: int, wrong: Any) -> None:
    arrays = pack_chosen(ChosenTokens([4], [LOGPROB]))
    arrays[which] = wrong
    with pytest.raises(ValueError, match=r"."):
        read_chosen(chosen(*arrays), vocab_size=8)


@pytest.mark.parametrize("said", [3, ["attend"], {"attend": 3}])
def test_words_on_kernels_are_words(said: Any) -> None:
    with pytest.raises(ValueError, match="must map operation names"):
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


def test_a_step_that_copies_its_point_says_where_to_and_the_next_one_copies_nothing() -> None:
    packer, reader = PassPacker(), a_reader()
    steps = [rows(point_copy=None)]
    for copy in (None, 2, None):
        steps.append(a_step(steps[-1], 6, point_copy=copy))
    found = [reader.read(sent(packer.pack(plain(each), at))) for at, each in enumerate(steps, 1)]
    assert [each.rows[0].point_copy for each in found] == [None, None, 2, None]
