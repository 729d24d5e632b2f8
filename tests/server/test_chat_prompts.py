"""From messages to tokens, and where the part that all chats share ends. No engine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stepwell.engine.loading.chat import ROLE_MARKERS, ChatTemplate
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE, byte_tokenizer
from stepwell.server.access.tenants import Principal, Principals, Secrets
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.chat import chat_prompt, chat_requests
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
        progress=nothing,
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


def test_ids_of_calls_are_nine_letters_and_digits_where_templates_of_mistral_take_no_others() -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.id }}{% endfor %}"
        "{% if message.tool_call_id %}={{ message.tool_call_id }};{% endif %}{% endfor %}"
    )

    def shown(*ids: str) -> list[str]:
        called = {"role": "assistant", "tool_calls": [{"id": each, "function": {"name": "f", "arguments": "{}"}} for each in ids]}
        reported = [{"role": "tool", "tool_call_id": each, "content": "x"} for each in ids]
        prompt = byte_tokenizer().decode(chat_prompt(served(template), [called, *reported], None)[0])
        begun, _, ended = prompt.partition("=")
        assert begun.split("[TOOL_CALLS]")[1:] == ended.replace("=", "").split(";")[:-1]
        return begun.split("[TOOL_CALLS]")[1:]

    assert shown("aB3dE6gH9") == ["aB3dE6gH9"], "as the model made it"
    nameless = {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f"}}, {"function": {"name": "f"}}]}
    prompt = byte_tokenizer().decode(chat_prompt(served(template), [nameless], None)[0])
    assert len({*prompt.split("[TOOL_CALLS]")}) == 3, "nothing before the first, and two of nine letters"
    made = shown("call_" + "0" * 24, "call_" + "0" * 23 + "1", "", "nine-chrs")
    assert len(set(made)) == 4 and all(len(each) == 9 and each.isalnum() for each in made)
    assert made == shown("call_" + "0" * 24, "call_" + "0" * 23 + "1", "", "nine-chrs"), "or the next prompt is another"


def test_what_a_client_sends_back_without_a_value_does_not_reach_templates() -> None:
    template = "{% for message in messages %}{% for key in message %}{{ key }} {% endfor %}{% endfor %}{# tool_calls #}"
    for calls in (None, []):
        message = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": calls, "name": "x"}
        tokens, _ = chat_prompt(served(template), [message], None)
        assert sorted(byte_tokenizer().decode(tokens).split()) == ["content", "name", "role"]


def test_reasoning_reaches_templates_that_call_it_thinking() -> None:
    template = "{% for message in messages %}{{ message.thinking or '-' }}{% endfor %}{# tool_calls #}"
    call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "assistant", "content": "7", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "assistant", "content": "Look:", "reasoning_content": "Not both.", "tool_calls": [call]},
        {"role": "assistant", "content": "8", "reasoning_content": "Other.", "thinking": "Own."},
    ]
    assert byte_tokenizer().decode(chat_prompt(served(template), said, None)[0]) == "Hm.So.-Own."


def test_a_chat_without_a_template_ends_where_the_model_begins_another_message() -> None:
    def stops(template: str | None, **more: object) -> tuple[str, ...]:
        body = ChatBody.model_validate({"messages": [USER], "stop": ["."], **more})
        return chat_requests(served(template), body, Principal(), 0.0)[0].sampling.stop

    assert stops(None) == (".", *ROLE_MARKERS)
    assert stops(None, ignore_eos=True) == (".",), "an answer that is to ignore its end goes on"
    assert len(stops(None, stop=["x"] * 16)) == 16, "the most that a request may have"
    assert stops(CHAT_TEMPLATE) == (".",)
