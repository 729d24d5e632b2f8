"""Settings of answers as OpenAI's and vLLM's clients send them, by the official client."""

from __future__ import annotations

import openai
import pytest

from server.serving import NAME
from server.test_openai_client import STORY, chat, complete
from stepwell.engine.loading.random_hybrid import byte_tokenizer


def test_a_bias_bans_a_token_or_makes_it_the_only_one(client: openai.OpenAI) -> None:
    free = complete(client, "Biased. " + STORY).choices[0].text
    banned = complete(client, "Biased. " + STORY, logit_bias={str(ord(free[0])): -100}).choices[0].text
    assert free[0] not in banned
    assert complete(client, "Biased. " + STORY, logit_bias={str(ord("q")): 100}).choices[0].text == "q" * 12


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI) -> None:
    often = complete(client, "Again. " + STORY, max_tokens=60, logit_bias={str(ord("q")): 3}).choices[0].text
    seldom = complete(
        client, "Again. " + STORY, max_tokens=60, logit_bias={str(ord("q")): 3}, frequency_penalty=2, presence_penalty=2
    )
    assert len(set(seldom.choices[0].text)) > len(set(often))
    extra = {"repetition_penalty": 100.0}
    once = complete(client, "Again. " + STORY, max_tokens=40, extra_body=extra).choices[0].text
    assert len(set(once)) == 40 and not set(once) & set("Again. " + STORY), "no token of prompt or answer"


def test_an_answer_has_its_least_length_and_says_which_token_ended_it(client: openai.OpenAI) -> None:
    free = complete(client, "Least. " + STORY, max_tokens=30).choices[0].text
    stop = {"stop_token_ids": [ord(free[5])]}
    ended = complete(client, "Least. " + STORY, max_tokens=30, extra_body=stop).choices[0]
    assert (ended.text, ended.finish_reason) == (free[: free.index(free[5])], "stop")
    assert ended.model_extra == {"stop_reason": ord(free[5])}
    longer = complete(client, "Least. " + STORY, max_tokens=30, extra_body=stop | {"min_tokens": 20}).choices[0].text
    assert len(longer) >= 20 and free[5] not in longer[:20]


def test_min_p_of_one_is_the_likeliest_token(client: openai.OpenAI) -> None:
    likeliest = complete(client, "Least likely. " + STORY).choices[0].text
    found = complete(client, "Least likely. " + STORY, temperature=5, seed=1, extra_body={"min_p": 1.0}).choices[0].text
    assert found == likeliest != complete(client, "Least likely. " + STORY, temperature=5, seed=1).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_its_answer_with_logprobs_of_both(client: openai.OpenAI, stream: bool) -> None:
    prompts = ["Echo. " + STORY, "Another."]
    alone = [complete(client, prompt, logprobs=2) for prompt in prompts]
    answer = complete(client, prompts, echo=True, logprobs=2, stream=stream)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for at, prompt in enumerate(prompts):
        mine = [choice for choice in choices if choice.index == at]
        assert "".join(choice.text for choice in mine) == prompt + alone[at].choices[0].text
        tokens = [token for choice in mine for token in choice.logprobs.tokens]
        values = [value for choice in mine for value in choice.logprobs.token_logprobs]
        offsets = [offset for choice in mine for offset in choice.logprobs.text_offset]
        assert "".join(tokens) == prompt + alone[at].choices[0].text and offsets[-1] == len(prompt) + 11
        assert values[0] is None and all(value <= 0 for value in values[1:])
        assert values[-12:] == pytest.approx(alone[at].choices[0].logprobs.token_logprobs, abs=1e-4)


def test_a_prompt_alone_can_be_scored(client: openai.OpenAI) -> None:
    (choice,) = complete(client, STORY, echo=True, max_tokens=0, logprobs=1).choices
    assert choice.text == STORY and len(choice.logprobs.tokens) == len(STORY) + 1  # type: ignore[union-attr,arg-type]
    ids = byte_tokenizer().encode(STORY)
    assert complete(client, ids, echo=True, max_tokens=0).choices[0].text == STORY


def test_logprobs_of_prompts_are_those_that_an_echo_shows(client: openai.OpenAI) -> None:
    echoed = complete(client, STORY, echo=True, max_tokens=0, logprobs=2).choices[0].logprobs
    reported = complete(client, STORY, extra_body={"prompt_logprobs": 2}).choices[0].model_extra
    assert reported is not None and echoed is not None
    entries = reported["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(STORY) + 1
    for token, value, entry in zip(byte_tokenizer().encode(STORY)[1:], echoed.token_logprobs[1:], entries[1:], strict=True):  # type: ignore[index]
        assert entry[str(token)]["logprob"] == pytest.approx(value) and entry[str(token)]["decoded_token"] == chr(token)
        assert sorted(each["rank"] for each in entry.values())[:2] == [1, 2]
    whole = chat(client, "Said.", STORY, extra_body={"prompt_logprobs": 0}).model_extra
    assert whole is not None and len(whole["prompt_logprobs"]) > len(STORY)


def test_an_answer_goes_on_from_the_last_message(client: openai.OpenAI) -> None:
    """Nothing of the template stands between what was begun and what comes, not even where the template would end a turn."""
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    begun = chat(client, "Be brief.", STORY, " The answer ", extra_body=extra)
    prompt = f"<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\n{STORY}<end_of_turn>\n"
    prompt += "<start_of_turn>assistant\n The answer "
    expected = complete(client, prompt)
    assert begun.choices[0].message.content == expected.choices[0].text
    assert begun.usage.prompt_tokens == expected.usage.prompt_tokens  # type: ignore[union-attr]
    first = chat(client, "Be brief.", STORY, max_tokens=20).choices[0].message.content
    assert first is not None
    rest = chat(client, "Be brief.", STORY, first[:8], extra_body=extra).choices[0].message.content
    assert first[:8] + (rest or "") == first


def test_seeds_repeat_with_all_of_these_at_once(client: openai.OpenAI) -> None:
    settings = {"temperature": 1.1, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {"65": 2}}
    extra = {"repetition_penalty": 1.1, "min_p": 0.01, "min_tokens": 10}
    one, again = (complete(client, "All. " + STORY, extra_body=extra, **settings).choices[0].text for _ in range(2))
    streamed = client.completions.create(
        model=NAME,
        prompt="All. " + STORY,
        max_tokens=12,
        stream=True,
        extra_body=extra,
        **settings,  # type: ignore[call-overload]
    )
    assert one == again == "".join(chunk.choices[0].text for chunk in streamed)
