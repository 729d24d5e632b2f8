"""The first request with a grammar: the vocabulary has been read by then, and no other request waits for it."""

from __future__ import annotations

import asyncio
import itertools
import json
import string
import threading
import time
from dataclasses import replace

import httpx
import pytest
import tokenizers
import torch

pytest.importorskip("llguidance")

import llguidance

from server.serving import CONFIG, HIDDEN, NAME, VOCAB, running, tensors, tiny_checkpoint
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.random_hybrid import byte_tokenizer
from stepwell.engine.loading.tokenizer import Tokenizer
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.requests.guided import Grammar, Guide, Guides, KeptGuides, Kind
from stepwell.server.served import Served
from waiting import PATIENCE_S

WORDS = 120_000
BODY = {"model": NAME, "prompt": "Pick one.", "max_tokens": 4, "structured_outputs": {"choice": ["up", "down"]}}


def many_words() -> Checkpoint:
    """The tiny model with the vocabulary of a large one: its bytes, then words that it never writes."""
    inner = json.loads(byte_tokenizer().to_json())
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    inner["model"]["vocab"] |= {"".join(word): number for number, word in enumerate(itertools.islice(letters, WORDS), VOCAB)}
    text = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(inner)), eos_ids=byte_tokenizer().eos_ids, bos_id=256, add_bos=True)
    more = torch.zeros(WORDS, HIDDEN)
    wide = tensors()
    wide |= {name: torch.cat([wide[name], more]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return replace(tiny_checkpoint(), text=text, config={**CONFIG, "vocab_size": VOCAB + WORDS}, source=HeldTensors(wide))


@pytest.fixture(scope="module")
def wide() -> Checkpoint:
    return many_words()


def test_health_answers_while_the_first_grammar_of_a_large_vocabulary_is_compiled(
    wide: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s: list[float] = []
    read = llguidance.LLTokenizer

    def reading(*args: object, **more: object) -> object:
        began_s = time.process_time()
        try:
            return read(*args, **more)
        finally:
            took_s.append(time.process_time() - began_s)

    monkeypatch.setattr(llguidance, "LLTokenizer", reading)
    with running(checkpoint=wide) as served:
        assert len(took_s) == 1, "the vocabulary is read before the server listens"
        asked = threading.Thread(
            target=httpx.post, args=(f"{served.address}/v1/completions",), kwargs={"json": BODY, "timeout": PATIENCE_S}
        )
        gaps_s = []
        with httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http:
            assert http.get("/health").status_code == 200
            asked.start()
            while asked.is_alive():  # CPU time of this process: what other processes take does not count
                since_s = time.process_time()
                assert http.get("/health").status_code == 200
                gaps_s.append(time.process_time() - since_s)
        asked.join()
    assert len(took_s) == 1 and max(gaps_s) < took_s[0] / 2, (max(gaps_s), took_s)


def guide() -> Guide:
    return Guide(None, 1, frozenset())


def regex(source: str) -> Grammar:
    return Grammar(kind=Kind.REGEX, source=source)


def test_a_tenant_with_many_grammars_evicts_its_own() -> None:
    kept = KeptGuides(budget_bytes=1 << 20)  # 15 small ones
    kept.add("quiet", regex("mine"), guide())
    for number in range(100):
        kept.add("busy", regex(f"{number:03}"), guide())
        assert kept.find("busy", regex("000")) or number > 50, "what is used stays longest"
    assert kept.find("quiet", regex("mine")) is not None and kept.find("busy", regex("099")) is not None
    assert kept.find("busy", regex("050")) is None and kept.find("quiet", regex("099")) is None
    assert sum(kept.find("busy", regex(f"{number:03}")) is not None for number in range(100)) > 10


def test_more_than_sixteen_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    guides = Guides(byte_tokenizer(), vocab_size=VOCAB, eos_ids=byte_tokenizer().eos_ids)
    monkeypatch.setattr(guides, "_compiled", lambda grammar: compiled.append(grammar) or guide())
    for _ in range(2):
        for number in range(200):
            guides.compile(regex(f"{number}"))
    assert len(compiled) == 200


def test_grammars_of_one_tenant_do_not_keep_those_of_another_waiting() -> None:
    with running() as made:
        served: Served = made.server.served
        goes_on = threading.Event()
        begun: list[str] = []
        done: list[str] = []

        def compile_(tenant: str) -> None:
            begun.append(tenant)
            assert goes_on.wait(PATIENCE_S)

        async def all_at_once() -> None:
            busy = [asyncio.ensure_future(served.compile_in_thread(0, "busy", lambda: compile_("busy"))) for _ in range(20)]
            await served.compile_in_thread(0, "other", lambda: done.append("other"))
            goes_on.set()
            await asyncio.gather(*busy)

        asyncio.run(asyncio.wait_for(all_at_once(), PATIENCE_S))
    assert done == ["other"] and begun.count("busy") == 20


def test_a_tokenizer_that_the_library_cannot_read_does_not_keep_the_server_from_starting() -> None:
    guides = Guides(byte_tokenizer(), vocab_size=3, eos_ids=byte_tokenizer().eos_ids)  # too few for its tokens
    guides.prepare()
    with pytest.raises(ConfigError, match="cannot be followed"):
        guides.compile(regex("x"))
