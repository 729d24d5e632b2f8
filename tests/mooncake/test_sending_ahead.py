"""Parts of a prompt that are sent while the rest is computed: the same bits as on one engine, and nothing depends on them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asking import ASKED, TOKEN, client, complete
from handed import Decode, Prefill

from parity.recorded import PAGE, Recorded, distance, same_bits
from stepwell.cli.demo.server import serving
from stepwell.engine import GenerateRequest, Sampling
from stepwell.server.ahead import PromptParts
from stepwell.store.peer.listing import parse
from stepwell.store_tier.hand_out import HandOut
from waiting import run_to_the_end, settle, step_until, wait_until

pytest.importorskip("transformers")

PART = 4 * PAGE  # which is where these engines leave checkpoints too


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def some_prompt(tokens: int = 12 * PAGE + 5) -> list[int]:
    random = Random(5)
    return [random.randrange(128) for _ in range(tokens)]


def fetch(decode: Decode, listing: bytes, tokens: list[int]) -> None:
    """Fetches what was offered, while no request waits for it."""
    cache = decode.recorded.engine.cache
    decode.store.add("part", "prefill", parse(listing))
    with cache.prefetch(cache.lookup(tokens)) as ticket:
        step_until(cache, lambda: ticket.ready)
    decode.store.withdraw("part")
    settle(cache)
    cache.audit()


def compute_in_parts(prefill: Prefill, prompt: list[int]) -> Iterator[HandOut]:
    """What can be handed out while a prompt is computed, part by part; the prefill engine has computed all of it at the end."""
    engine = prefill.recorded.engine
    progress = PromptParts(GenerateRequest(tokens=prompt), PART)
    engine.submit(GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=1)))
    while engine.num_open:
        engine.step()
        settle(engine.cache)
        if (out := progress.part(engine)) is not None and engine.num_open:
            yield out
            engine.cache.pins.release(out.pin)
    run_to_the_end(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4"])
def test_bits_are_those_of_one_engine_and_parts_are_not_fetched_again(stack: ExitStack, family: str) -> None:
    prompt = some_prompt()
    recorded = Recorded(family)
    recorded.play(prompt, answer=1)
    one = recorded.play(prompt)
    recorded.close()
    prefill, decode = Prefill(stack, family), Decode(stack, family)
    told, parts = 0, 0
    for out in compute_in_parts(prefill, prompt):
        part = out.since(told)
        assert len(part.pages.keys) == (out.tokens - told) // PAGE, "pages are listed once"
        fetch(decode, prefill.listing(part), prompt[: out.tokens + 1])
        told, parts = out.tokens, parts + 1
        assert decode.recorded.engine.cache.lookup(prompt).restore_tokens == told, "it could be resumed from already"
    assert parts > 1, "nothing was sent while the prompt was computed"
    prefill.recorded.settle()
    whole = prefill.recorded.engine.cache.hand_out(prompt, ttl_s=600)
    assert whole is not None
    played = decode.play(prompt, prefill.listing(whole))
    assert played.resumed == one.resumed == whole.tokens
    assert played.stored == whole.tokens - told, "what came ahead is in memory"
    assert same_bits(played, one), f"differs by {distance(played, one)}"


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_part_that_is_damaged_on_the_way_comes_with_the_whole(stack: ExitStack, family: str) -> None:
    prompt = some_prompt()
    prefill, decode = Prefill(stack, family), Decode(stack, family)
    parts = compute_in_parts(prefill, prompt)
    out = next(parts)
    listing = bytearray(prefill.listing(out))
    listing[-100] ^= 1  # of a stamp, or of the address of a page
    fetch(decode, bytes(listing), prompt[: out.tokens + 1])
    assert decode.recorded.engine.cache.lookup(prompt).restore_tokens < out.tokens
    for _ in parts:
        pass
    prefill.recorded.settle()
    whole = prefill.recorded.engine.cache.hand_out(prompt, ttl_s=600)
    assert whole is not None
    played = decode.play(prompt, prefill.listing(whole))
    recorded = Recorded(family)
    recorded.play(prompt, answer=1)
    one = recorded.play(prompt)
    recorded.close()
    assert played.resumed == whole.tokens and same_bits(played, one)


def test_a_server_that_ends_in_the_midst_costs_nothing_but_the_part(stack: ExitStack) -> None:
    prompt = some_prompt()
    prefill, decode = Prefill(stack, "gemma3"), Decode(stack, "gemma3")
    parts = compute_in_parts(prefill, prompt)
    out = next(parts)
    fetch(decode, prefill.listing(out), prompt[: out.tokens + 1])
    more = next(parts)
    listing = prefill.listing(more.since(out.tokens))
    os.kill(prefill.shown.pid, signal.SIGKILL)
    fetch(decode, listing, prompt[: more.tokens + 1])
    assert decode.store.counters.snapshot()["peer_lanes_lost"] == 1
    for _ in parts:
        pass
    played = decode.recorded.play(prompt)
    recorded = Recorded("gemma3")
    cold = recorded.play(prompt)
    recorded.close()
    assert played.resumed == out.tokens, "what came before is there"
    assert played.tokens == cold.tokens


# ---- servers --------------------------------------------------------------------------------------

ARGUMENTS = [
    "--model", "random-hybrid", "--served-model-name", "demo", "--device", "cpu", "--device-memory", "64MiB", "--host-memory",
    "64MiB", "--peer-token", TOKEN, "--checkpoint-interval", "1024", "--chunk-tokens", "256",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Pair:
    """A prefill server that knows its decode server, and the other way round. Killed at the end."""

    def __init__(self, directory: Path, lives: ExitStack) -> None:
        ports = free_port(), free_port()
        prefill = [*ARGUMENTS, "--role", "prefill", "--peer", f"127.0.0.1:{ports[1]}", "--port", str(ports[0])]
        decode = [*ARGUMENTS, "--role", "decode", "--peer", f"127.0.0.1:{ports[0]}", "--port", str(ports[1])]
        self.decode_life = lives.enter_context(ExitStack())
        self.prefill_log = directory / "prefill.log"
        self.prefill = client(lives.enter_context(serving(prefill, self.prefill_log)).address)
        decode += ["--prefetch-policy", "wait_complete"]
        self.decode = client(self.decode_life.enter_context(serving(decode, directory / "decode.log")).address)
        lives.callback(self.prefill.close)
        lives.callback(self.decode.close)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as lives:
        yield Pair(tmp_path_factory.mktemp("ahead"), lives)


def numbers(seed: int, count: int = 12_000) -> list[int]:
    random = Random(seed)
    return [random.randrange(200) for _ in range(count)]


def test_the_decode_server_has_most_of_a_long_prompt_before_it_is_asked(pair: Pair) -> None:
    """Where the decode server gets no processor meanwhile, nothing comes ahead, and on a busy machine a transfer may be given up
    and the prompt computed: then another one is tried.
    """
    for seed in range(10, 20):
        prompt = numbers(seed)
        params = complete(pair.prefill, prompt, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
        answer = complete(pair.decode, prompt, 8, kv_transfer_params=params)
        told = answer["usage"]["prompt_tokens_details"]
        assert answer["choices"] == complete(pair.prefill, prompt, 8, cache_salt="computed anew")["choices"]
        if told["store_tokens"] < told["cached_tokens"] and told["cached_tokens"] > 0.9 * len(prompt):
            break
    assert told["cached_tokens"] > 0.9 * len(prompt)
    assert 0 < told["store_tokens"] < told["cached_tokens"], "some came ahead, and the rest with the request"


def test_parts_are_taken_from_servers_with_the_token_and_make_sense(pair: Pair) -> None:
    def told(token: str, **body: Any) -> int:
        return pair.decode.post("/handover/ahead", json=body, headers={"Authorization": f"Bearer {token}"}).status_code

    offer = {"remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": "x" * 32}
    good = {**offer, "tokens": [1, 2, 3], "salt": None, "tenant": None, "priority": 0, "ttl_s": None}
    assert told("another", **good) == told(TOKEN[:-1], **good) == 401
    assert told(TOKEN, **good) == 200, "a server that was not named at the start: nothing is asked of it"
    not_so = (
        {"tokens": "abc"},
        {"tokens": []},
        {"tokens": [1.5]},
        {"salt": 3},
        {"tenant": "x" * 10_000},
        {"remote_request_id": 3},
    )
    for wrong in not_so:
        assert told(TOKEN, **{**good, **wrong}) == 400, wrong
    assert pair.decode.post("/handover/ahead", content=b"[", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 400


def test_a_decode_server_that_was_killed_costs_the_prefill_server_nothing(pair: Pair) -> None:
    pair.decode_life.close()  # kill -9
    prompt = numbers(2)
    assert complete(pair.prefill, prompt, 1, kv_transfer_params=ASKED)["kv_transfer_params"] is not None
    wait_until(lambda: "cannot send parts of a prompt to 127.0.0.1" in pair.prefill_log.read_text(), "it is said")
