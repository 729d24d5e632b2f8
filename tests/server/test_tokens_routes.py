"""What a prompt is in tokens, and back; what the server does not do."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from server.serving import CONTEXT, NAME
from stepwell.engine.loading.random_hybrid import byte_tokenizer


def test_text_and_chats_become_the_tokens_that_prompts_have(http: httpx.Client, client: openai.OpenAI) -> None:
    reported = http.post("/tokenize", json={"model": NAME, "prompt": "Hëllo", "return_token_strs": True}).json()
    ids = byte_tokenizer().encode("Hëllo")
    assert reported == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT,
                    "token_strs": [byte_tokenizer().decode([each], special=True) for each in ids]}  # fmt: skip
    assert http.post("/tokenize", json={"prompt": "Hëllo", "add_special_tokens": False}).json()["tokens"] == ids[1:]
    messages = [{"role": "user", "content": "How long?"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert chat["count"] == answer.usage.prompt_tokens  # type: ignore[union-attr]
    shorter = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert chat["tokens"][: len(shorter)] == shorter != chat["tokens"]


def test_tokens_become_the_text_again(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "Zwölf Stufen"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<bos>Zwölf Stufen"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400), ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, 400),
        ("/tokenize", {"prompt": "\ud800"}, 400), ("/tokenize", {"prompt": "x", "model": "another"}, 404),
        ("/detokenize", {"tokens": [72, 260]}, 400), ("/detokenize", {"tokens": [72, 2**31 - 1]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400), ("/detokenize", {"tokens": [10**30]}, 400), ("/detokenize", {"tokens": "x"}, 400),
    ],
)  # fmt: skip
def test_what_has_no_tokens_is_refused(http: httpx.Client, path: str, body: dict[str, object], status: int) -> None:

    response = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status and response.json()["error"]["message"]


def test_a_number_past_the_vocabulary_is_named(http: httpx.Client) -> None:
    error = http.post("/detokenize", json={"tokens": [72, 300, 260, 105]}).json()["error"]
    assert error["param"] == "tokens" and "no token 260" in error["message"]


def test_embeddings_are_refused_with_a_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not compute embeddings"):
        client.embeddings.create(model=NAME, input="x")
