"""`stepwell serve --role prefill` and `--role decode` as processes, paired by a client that does what vLLM's proxies do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from asking import ARGUMENTS, ASKED, TOKEN, client, complete, hand_over, prompt_of, stored, text_of

from stepwell.cli.demo.server import serving
from waiting import wait_until


class Pair:
    """A prefill and a decode server. Killed at the end."""

    def __init__(self, directory: Path, lives: ExitStack) -> None:
        self.prefill_life = lives.enter_context(ExitStack())
        key = directory / "key"
        key.write_text("0123456789abcdef" * 4)
        key.chmod(0o600)
        arguments = [*ARGUMENTS, "--store-key-file", str(key)]
        prefill = [*arguments, "--role", "prefill"]
        self.prefill = client(self.prefill_life.enter_context(serving(prefill, directory / "prefill.log")).address)
        peer = f"{self.prefill.base_url.host}:{self.prefill.base_url.port}"
        decode = [*arguments, "--role", "decode", "--peer", peer, "--prefetch-policy", "wait_complete"]
        self.decode_log = directory / "decode.log"
        self.decode = client(lives.enter_context(serving(decode, self.decode_log)).address)
        lives.callback(self.prefill.close)
        lives.callback(self.decode.close)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as lives:
        yield Pair(tmp_path_factory.mktemp("pair"), lives)


def offer_status(pair: Pair, params: dict[str, Any], token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return pair.prefill.get(f"/handover/{params['remote_request_id']}", headers=headers).status_code


def test_the_decode_server_goes_on_where_the_prefill_server_was(pair: Pair) -> None:
    prompt = prompt_of("rivers")
    params = hand_over(pair.prefill, prompt)
    assert offer_status(pair, params, TOKEN) == 200
    answer = complete(pair.decode, prompt, 12, kv_transfer_params=params)
    assert stored(answer) > answer["usage"]["prompt_tokens"] // 2
    assert text_of(answer) == text_of(complete(pair.prefill, prompt, 12, cache_salt="computed anew"))
    wait_until(lambda: offer_status(pair, params, TOKEN) == 404, "the prefill server has its memory back")
    again = complete(pair.decode, prompt, 12, kv_transfer_params=params)  # an offer that has ended; it is in memory now
    assert text_of(again) == text_of(answer) and stored(again) == 0


def test_salts_are_kept_apart(pair: Pair) -> None:
    prompt = prompt_of("locks")
    params = complete(pair.prefill, prompt, 1, kv_transfer_params=ASKED, cache_salt="mine")["kv_transfer_params"]
    assert stored(complete(pair.decode, prompt, 4, kv_transfer_params=params, cache_salt="yours")) == 0
    params = complete(pair.prefill, prompt, 1, kv_transfer_params=ASKED, cache_salt="mine")["kv_transfer_params"]
    assert stored(complete(pair.decode, prompt, 4, kv_transfer_params=params, cache_salt="mine")) > 0


def test_streams_and_chats_go_on_too(pair: Pair) -> None:
    messages = [{"role": "user", "content": prompt_of("bridges")}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "ignore_eos": True}
    params = pair.prefill.post("/v1/chat/completions", json={**body, "max_tokens": 1, "kv_transfer_params": ASKED}).json()
    body |= {"max_tokens": 6, "kv_transfer_params": params["kv_transfer_params"], "stream": True}
    streamed = pair.decode.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}).text
    assert streamed.rstrip().endswith("[DONE]")
    (tokens,) = re.findall(r'"store_tokens":(\d+)', streamed)
    assert int(tokens) > 0


def test_offers_are_for_those_who_have_the_token(pair: Pair) -> None:
    params = hand_over(pair.prefill, prompt_of("doors"))
    assert [offer_status(pair, params, token) for token in (None, "another", TOKEN[:-1], TOKEN)] == [401, 401, 401, 200]
    assert pair.prefill.delete(f"/handover/{params['remote_request_id']}").status_code == 401
    unknown = {**params, "remote_request_id": "x" * 32}
    assert offer_status(pair, unknown, TOKEN) == 404


def test_servers_that_were_not_named_at_the_start_are_not_asked(pair: Pair) -> None:
    prompt = prompt_of("strangers")
    params = hand_over(pair.prefill, prompt)
    for elsewhere in ({"remote_host": "192.0.2.77"}, {"remote_port": 9}):
        answer = complete(pair.decode, prompt + str(elsewhere), 4, kv_transfer_params={**params, **elsewhere})
        assert stored(answer) == 0
    assert "which was not given with --peer" in pair.decode_log.read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_host": None}, {"remote_port": "eight"}, {"remote_port": None}, {"remote_request_id": "../../cache"},
        {"remote_request_id": 7}, {"remote_request_id": "x" * 100}, {"remote_host": ["a"]},
    ],
)  # fmt: skip
def test_what_names_no_request_is_refused(pair: Pair, wrong: dict[str, Any]) -> None:
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 8000, "remote_request_id": "x" * 32} | wrong
    body = {"model": "demo", "prompt": "abc", "max_tokens": 1, "kv_transfer_params": params}
    response = pair.decode.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "kv_transfer_params"


def test_a_prompt_too_short_to_be_resumed_is_not_offered(pair: Pair) -> None:
    assert complete(pair.prefill, "abc", 1, kv_transfer_params=ASKED)["kv_transfer_params"] is None


def test_a_prefill_server_that_was_killed_costs_a_computation(pair: Pair) -> None:
    prompt = prompt_of("endings")
    right = text_of(complete(pair.prefill, prompt, 8, cache_salt="computed anew"))
    params = hand_over(pair.prefill, prompt)
    pair.prefill_life.close()  # kill -9
    answer = complete(pair.decode, prompt, 8, kv_transfer_params=params)
    assert stored(answer) == 0 and text_of(answer) == right
