"""From messages to tokens, and where the part that all chats share ends. No engine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE, byte_tokenizer
from stepwell.server.access.principals import Principals, Secrets
from stepwell.server.api.chat import chat_prompt
from stepwell.server.errors import ApiError
from stepwell.server.served import Served

SYSTEM = {"role": "system", "content": "Be a well."}
USER = {"role": "user", "content": "How deep?"}
TOOLS = [{"type": "function", "function": {"name": "measure"}}]
STRICT = "{% if messages[-1].role != 'user' %}{{ raise_exception('users speak last') }}{% endif %}" + CHAT_TEMPLATE
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE.removeprefix("{{ bos_token }}")


def served(template: str | None) -> Served:
    nothing = cast(Any, None)
    return Served(
        loop=nothing,
        name="x",
        text=byte_tokenizer(),
        chat=ChatTemplate(template, bos_token="<bos>"),
        max_context=1000,
        metrics=nothing,
        load=nothing,
        history=nothing,
        principals=Principals(Secrets(api_key=None, admin_token="x")),
        clock=nothing,
    )


def head(template: str, *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str | None:
    """What the hint says is shared, as text."""
    tokens, hints = chat_prompt(served(template), messages, tools)
    text = byte_tokenizer()
    return "".join(text.decode([t]) or text.token(t) for t in tokens[: hints[0]]) if hints else None


def test_the_system_prompt_ends_where_the_first_turn_begins() -> None:
    shared = "<bos><start_of_turn>system\nBe a well.<end_of_turn>\n"
    assert head(CHAT_TEMPLATE, SYSTEM, USER) == shared
    assert head(CHAT_TEMPLATE, SYSTEM, USER, {"role": "assistant", "content": "7"}, USER) == shared
    assert head(CHAT_TEMPLATE, {**SYSTEM, "role": "developer"}, USER) == shared


def test_without_a_system_prompt_there_is_nothing_to_mark() -> None:
    assert head(CHAT_TEMPLATE, USER) is None


def test_templates_that_want_a_user_are_given_one() -> None:
    assert head(STRICT, SYSTEM, USER) == "<bos><start_of_turn>system\nBe a well.<end_of_turn>\n<start_of_turn>user\n"


def test_tools_count_too() -> None:
    tool = '{"type": "function", "function": {"name": "measure"}}\n'
    assert head(WITH_TOOLS, USER, tools=TOOLS) == "<bos>" + tool
    assert head(WITH_TOOLS, SYSTEM, USER, tools=TOOLS) == f"<bos>{tool}<start_of_turn>system\nBe a well.<end_of_turn>\n"


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_tools_are_refused_where_the_template_would_drop_them(template: str | None) -> None:
    with pytest.raises(ApiError, match="does not know tools") as caught:
        chat_prompt(served(template), [USER], TOOLS)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "measure", "arguments": "{}"}}]}
    with pytest.raises(ApiError, match=r"messages\[1\].*does not know tool_calls"):
        chat_prompt(served(template), [USER, called], None)
    assert chat_prompt(served(template), [USER, {**called, "tool_calls": []}], [])


def test_arguments_of_tools_reach_templates_as_data() -> None:
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    for sent, seen in (('{"a": 1}', '{"a": 1}'), ("", "{}"), ("{half", '"{half"')):
        message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": sent}}]}
        tokens, _ = chat_prompt(served(template), [message], None)
        assert byte_tokenizer().decode(tokens) == seen


def test_arguments_of_tools_reach_templates_that_add_them_to_text_as_json() -> None:
    """As the templates of DeepSeek V3 and V3.1 do."""
    template = "{% for call in messages[0].tool_calls %}{{ call.function.name + '|' + call.function.arguments }}{% endfor %}"
    for sent, seen in (('{"a":  "é"}', 'f|{"a": "é"}'), ("", "f|{}"), ("{half", "f|{half"), ({"b": [1]}, 'f|{"b": [1]}')):
        message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": sent}}]}
        tokens, _ = chat_prompt(served(template), [message], None)
        assert byte_tokenizer().decode(tokens) == seen
    refusing = template + "{{ raise_exception('never') }}"
    with pytest.raises(ApiError, match="can only concatenate"):
        chat_prompt(served(refusing), [message], None)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    with pytest.raises(ApiError, match=r"."):  # whether the template or its JSON is what fails
        chat_prompt(served(template), [message], None)


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(ApiError, match="users speak last") as caught:
        chat_prompt(served(STRICT), [SYSTEM], None)
    assert (caught.value.status, caught.value.param) == (400, "messages")
