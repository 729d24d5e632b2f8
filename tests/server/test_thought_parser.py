"""Thoughts before an answer that follows a grammar end with the token behind which the grammar begins. No engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from server.test_chat_prompts import served
from stepwell.engine.requests.guided import Guide, Thoughts
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest, Sampling
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.chat_form import ChatForm, chat_form

TEXTS = ["<think>", "</think>", "</", "think", ">", " so ", '{"a":', " 1}", ""]
OPEN, CLOSE, END = 0, 1, 8
SPELLED = [2, 3, 4]  # the marker in other tokens, behind which no grammar begins


class Words:
    """As much of a tokenizer as a form needs."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(TEXTS[each] for each in ids)


def a_form(*, begun: bool) -> ChatForm:
    body = ChatBody.model_validate(
        {"model": "x", "messages": [{"role": "user", "content": "?"}], "response_format": {"type": "json_object"}}
    )
    guide = Guide(None, len(TEXTS), frozenset({END}), Thoughts(open=OPEN, close=CLOSE, begun=begun))
    made = replace(served(None), text=cast(Any, Words()), reasoning_parser="think")
    return chat_form(made, body, [GenerateRequest(tokens=[OPEN], sampling=Sampling(), guide=guide)])


def reported(tokens: Sequence[int], *, begun: bool, at_once: int, late: int) -> tuple[str, ...]:
    """Reasoning and content of an answer with `at_once` tokens in each delta, and text that comes `late` tokens late."""
    form, pieces, texts = a_form(begun=begun), [], [""] * late + [TEXTS[each] for each in tokens]
    for start in range(0, len(tokens), at_once):
        stop = start + at_once
        is_last = stop >= len(tokens)
        delta = Delta(
            request=1, tokens=tuple(tokens[start:stop]), text="".join(texts[start:] if is_last else texts[start:stop]),
            finish=Finish.STOP if is_last else None,
        )  # fmt: skip
        made = form.piece(0, delta)
        pieces.append({} if made is None else made["delta"])
    return tuple("".join(each.get(name, "") for each in pieces) for name in ("reasoning_content", "content"))


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(
    ("begun", "tokens", "expected"),
    [
        (True, [5, CLOSE, 6, 7, END], ("so", '{"a": 1}')),
        (True, [5, *SPELLED, 6, 5, CLOSE, 6, 7, END], ('so </think>{"a": so', '{"a": 1}')),
        (True, [*SPELLED, *SPELLED, CLOSE, 7, END], ("</think></think>", " 1}")),
        (True, [5, *SPELLED, 6, 7], ('so </think>{"a": 1}', "")),
        (True, [CLOSE, *SPELLED, CLOSE, END], ("", "</think></think>")),
        (False, [OPEN, 5, *SPELLED, 5, CLOSE, 6, 7, END], ("so </think> so", '{"a": 1}')),
        (False, [6, 7, END], ("", '{"a": 1}')),
        (False, [*SPELLED, 6, END], ("", '</think>{"a":')),
    ],
)
def test_a_marker_that_is_spelled_out_ends_no_thoughts(
    begun: bool, tokens: list[int], expected: tuple[str, str], at_once: int, late: int
) -> None:
    assert reported(tokens, begun=begun, at_once=at_once, late=late) == expected
