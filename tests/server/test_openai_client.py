"""The official client against the server, unchanged."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from server.serving import CONTEXT, NAME, PAGE, Held, Running, running
from stepwell.engine.loading.random_hybrid import byte_tokenizer
from waiting import PATIENCE_S

STORY = "Once upon a time, at the foot of a hill, villagers dug a well with steps. "


def complete(client: openai.OpenAI, prompt: object, **more: object) -> openai.types.Completion:
    settings = {"max_tokens": 12, "temperature": 0} | more
    return client.completions.create(model=NAME, prompt=prompt, **settings)  # type: ignore[call-overload,no-any-return]


def chat(client: openai.OpenAI, *contents: str, **more: object) -> openai.types.chat.ChatCompletion:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    settings = {"max_tokens": 12, "temperature": 0} | more
    return client.chat.completions.create(model=NAME, messages=messages, **settings)  # type: ignore[call-overload,no-any-return]


def test_models_are_listed(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [NAME] and client.models.retrieve(NAME).object == "model"
    assert listed[0].model_extra == {"max_model_len": CONTEXT}


def test_a_completion_has_text_and_usage(client: openai.OpenAI) -> None:
    answer = complete(client, "A completion. " + STORY)
    assert answer.object == "text_completion" and answer.model == NAME and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (len(choice.text), choice.finish_reason, choice.index, choice.logprobs) == (12, "length", 0, None)
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12 == len("A completion. " + STORY) + 1 + 12


def test_tokens_are_a_prompt_too(client: openai.OpenAI) -> None:
    text = complete(client, "By number. " + STORY).choices[0].text
    assert complete(client, byte_tokenizer().encode("By number. " + STORY)).choices[0].text == text


def test_several_prompts_get_an_answer_each(client: openai.OpenAI) -> None:
    prompts = ["One. " + STORY, "Another. " + STORY, "A third."]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    together = complete(client, prompts)
    assert [choice.text for choice in together.choices] == alone and [choice.index for choice in together.choices] == [0, 1, 2]
    assert together.usage is not None and together.usage.prompt_tokens == sum(len(prompt) + 1 for prompt in prompts)


def test_a_stream_of_completions_says_the_same(client: openai.OpenAI) -> None:
    prompts = ["Streamed. " + STORY, "Streamed too. " + STORY]
    whole = complete(client, prompts)
    texts, ends, usage = ["", ""], {}, None
    for chunk in complete(client, prompts, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices] and ends == {0: "length", 1: "length"}
    assert usage is not None and whole.usage is not None and usage.total_tokens == whole.usage.total_tokens


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    whole = chat(client, "Be brief.", STORY).choices[0]
    chunks = list(chat(client, "Be brief.", STORY, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert whole.message.role == "assistant" and len(whole.message.content or "") == 12


def test_the_next_turn_of_a_chat_is_cached(client: openai.OpenAI) -> None:
    first = chat(client, "You remember. " + STORY, "What was dug?", max_tokens=20)
    said = first.choices[0].message.content or ""
    second = chat(client, "You remember. " + STORY, "What was dug?", said, "And where?")
    third = chat(client, "You remember. " + STORY, "What was dug?", said, "And where?")
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second, third)]  # type: ignore[union-attr]
    assert cached[0] < cached[1] < cached[2] and cached[1] >= len(STORY)
    assert second.choices[0].message.content == third.choices[0].message.content
    details = third.usage.prompt_tokens_details.model_dump()  # type: ignore[union-attr]
    assert sum(details[f"{tier}_tokens"] for tier in ("device", "host", "store")) == cached[2]


def test_a_system_prompt_is_resumed_at_its_end(client: openai.OpenAI) -> None:
    """Two chats that share nothing but their system prompt: without a hint no checkpoint would stand there."""
    system = "Two strangers share this. " + STORY * 2
    first = chat(client, system, "x" * 100)
    second = chat(client, system, "y" * 100)
    shared = len("b" + "t" + "system\n" + system + "e" + "\n")  # special tokens count one each
    assert first.usage.prompt_tokens_details.cached_tokens == 0  # type: ignore[union-attr]
    assert second.usage.prompt_tokens_details.cached_tokens == shared // PAGE * PAGE  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_an_answer_before_them(client: openai.OpenAI, stream: bool) -> None:
    prompt = "Stopping. " + STORY
    text = complete(client, prompt, max_tokens=30).choices[0].text
    stop = text[9:12]
    answer = complete(client, prompt, max_tokens=30, stop=["never this", stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert complete(client, prompt, max_tokens=30, stop=stop).choices[0].text == text[: text.index(stop)]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, "Likely. " + STORY, logprobs=3).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens is not None and "".join(found.tokens) == choice.text
    assert found.text_offset == list(range(12)) and all(value <= 0 for value in found.token_logprobs or [])
    for token, value, top in zip(found.tokens, found.token_logprobs or [], found.top_logprobs or [], strict=True):
        assert len(top) == 3 and top[token] == value == max(top.values())  # greedy takes the likeliest
    streamed = list(complete(client, "Likely. " + STORY, logprobs=3, stream=True))
    offsets = [offset for chunk in streamed for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == found.text_offset


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, "Likely.", STORY, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content if choice.logprobs is not None else None
    assert content is not None and "".join(each.token for each in content) == choice.message.content
    assert all(bytes(each.bytes or []).decode() == each.token and len(each.top_logprobs) == 2 for each in content)
    plain = chat(client, "Likely.", STORY, logprobs=True).choices[0].logprobs
    assert plain is not None and [each.top_logprobs for each in plain.content or []] == [[]] * 12


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    warm = {"temperature": 1.5, "max_tokens": 24}
    one, again, other = (complete(client, "Dice. " + STORY, seed=seed, **warm).choices[0].text for seed in (7, 7, 8))
    assert one == again != other
    both = complete(client, "Dice. " + STORY, seed=7, n=2, **warm)
    assert [choice.text for choice in both.choices] == [one, other]
    assert both.usage is not None and both.usage.prompt_tokens == len("Dice. " + STORY) + 1 and both.usage.completion_tokens == 48
    free = {complete(client, "Dice. " + STORY, **warm).choices[0].text for _ in range(3)}
    assert len(free) == 3


def test_seeds_may_be_below_zero_as_in_openai_s_api(client: openai.OpenAI) -> None:
    warm = {"max_tokens": 20, "temperature": 1.0, "n": 3}
    texts = [[each.text for each in complete(client, "Dice. " + STORY, seed=seed, **warm).choices] for seed in (-1, -1, 5)]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 3


def test_no_alternatives_are_no_mistake(client: openai.OpenAI) -> None:
    """Clients send a 0 where the user asked for no logprobs."""
    assert chat(client, "None.", STORY, top_logprobs=0, max_tokens=2).choices[0].logprobs is None


def test_content_may_come_in_parts_and_developers_are_heard(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "In two"}, {"type": "text", "text": "parts."}]
    messages = [{"role": "developer", "content": "Obey."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=5, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == chat(client, "Obey.", "In two\nparts.", max_tokens=5).choices[0].message.content


def test_many_at_once_answer_as_they_do_alone(client: openai.OpenAI, served: Running) -> None:
    prompts = [f"{STORY}Number {number}: {'z' * (number * 7 % 50)}" for number in range(24)]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts[::6]]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda prompt: complete(client, prompt).choices[0].text, prompts))
    assert together[::6] == alone
    served.audit()


def test_salts_separate_tenants(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int:
        usage = complete(client, "Secret. " + STORY, extra_body={"cache_salt": salt, "cache_ttl_s": 600.0}).usage
        return usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert cached("a") == cached("b") == cached(None) > 0


def test_the_role_comes_with_the_first_token_so_that_clients_can_time_it() -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": STORY}], "max_tokens": 2, "stream": True}
    with (
        running() as made,
        Held(made) as held,
        httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines: list[tuple[str, bool]] = []
        released = threading.Event()
        reader = threading.Thread(target=lambda: lines.extend((line, released.is_set()) for line in response.iter_lines()))
        reader.start()
        made.settle(lambda engine: engine.num_open == 1)
        for _ in range(20):  # in which the loop would send what it has
            assert httpx.get(f"{made.address}/health").status_code == 200
        released.set()
        held.let_go()
        reader.join(PATIENCE_S)
    assert all(late for _, late in lines), "nothing comes before the first token"
    assert '"role":"assistant"' in lines[0][0] and "data: [DONE]" in [line for line, _ in lines]
