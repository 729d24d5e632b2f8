"""How much of an answer is reasoning stands in its usage, as the official client reads it: whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.completion_usage import CompletionTokensDetails
from openai.types.responses.response_usage import OutputTokensDetails

pytest.importorskip("llguidance")

from server.serving import NAME, Running, running, tiny_checkpoint
from server.test_response_tools import ASKED
from server.test_tool_calls import END, TEMPLATE, THOUGHT, USER, Script
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE
from stepwell.server.api.parsing import formats
from stepwell.server.api.parsing.blocks import Reasoning

THINKS = "<think>\nRome, of course.\n</think>"  # 33 letters, three a token
COUNTED = [
    ("content", "Rome.", 0),
    ("a thought and calls", THOUGHT, 11),
    ("a thought", THINKS, 11),
    ("cut", "<think>\n" + "a" * 3000, 40),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(
        checkpoint=replace(tiny_checkpoint(), chat=ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>"))
    ) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=[USER], temperature=0, stop=END, max_tokens=40, **more)


def details_of(usage: Any) -> CompletionTokensDetails:
    details = usage.completion_tokens_details
    assert isinstance(details, CompletionTokensDetails)
    return details


@pytest.mark.parametrize(("text", "expected"), [each[1:] for each in COUNTED], ids=[each[0] for each in COUNTED])
def test_the_usage_of_chats_and_responses_tells_how_much_was_thought(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, text: str, expected: int
) -> None:
    monkeypatch.setattr(served.engine.text, "stream", lambda after, *, special: Script(text))
    assert details_of(ask(client).usage).reasoning_tokens == expected
    assert details_of(ask(client, n=3).usage).reasoning_tokens == 3 * expected
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert details_of(last.usage).reasoning_tokens == expected and not any(chunk.usage for chunk in chunks)
    more: Any = {**ASKED, "max_output_tokens": 40, "extra_body": {"stop": END}}
    made = client.responses.create(**more)
    events: list[Any] = list(client.responses.create(**more, stream=True))
    for response in (made, events[-1].response):
        assert isinstance(response.usage.output_tokens_details, OutputTokensDetails)
        assert response.usage.output_tokens_details.reasoning_tokens == expected <= response.usage.output_tokens


def test_what_is_thought_before_a_format_counts_to_the_token_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.REASONING, "think", Reasoning(open="[", close="]"))  # type: ignore[index]
    chat = ChatTemplate(CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n[{%"), bos_token="<bos>", eos_token="<eos>")
    more: Any = {"temperature": 1, "seed": 4, "logit_bias": {str(ord("]")): 1}, "max_tokens": 200, "logprobs": True, "n": 8}
    choice = {"structured_outputs": {"choice": ["up", "down"]}}
    with (
        running(checkpoint=replace(tiny_checkpoint(), chat=chat), serving={"reasoning_parser": "think"}) as thinker,
        thinker.client() as client,
    ):
        made = client.chat.completions.create(model=NAME, messages=[USER], extra_body=choice, **more)
        streamed = client.chat.completions.create(
            model=NAME, messages=[USER], extra_body=choice, stream=True, stream_options={"include_usage": True}, **more
        )
        last = list(streamed)[-1]
    tokens = [[each.token for each in choice.logprobs.content or []] for choice in made.choices if choice.logprobs]
    expected = sum(each.index("]") + 1 if "]" in each else len(each) for each in tokens)
    assert details_of(made.usage).reasoning_tokens == expected == details_of(last.usage).reasoning_tokens > 8


def test_completions_say_nothing_of_reasoning_since_nothing_is_set_apart(client: openai.OpenAI) -> None:
    made = client.completions.create(model=NAME, prompt="<think>", max_tokens=2)
    assert made.usage is not None and made.usage.completion_tokens_details is None
