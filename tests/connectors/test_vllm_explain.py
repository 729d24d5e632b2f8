"""A request below vLLM may ask why it resumes where it does: the answer comes back with it, and asking need not store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_runs import Lora, Make, computed_by, text
from toy_vllm import ToyEngine

from waiting import wait_until

WHY = {"stepwell_explain": True}


def why(engine: ToyEngine, tokens: list[int], **more: Any) -> dict[str, Any]:
    request = engine.submit(tokens, kv_transfer_params=WHY | {"stepwell_store": False}, **more)
    engine.run()
    assert request.returned is not None
    return request.returned["stepwell"]


@pytest.mark.parametrize("model", ["full", "all"])
def test_a_request_is_told_why_it_resumes_where_it_does(make: Make, model: str) -> None:
    engine, prompt = make(model, explain=True), text(1, 45)
    first = why(engine, prompt)
    assert (first["cause"], first["restore_tokens"]) == ("never_stored", 0) and "never stored" in first["says"]
    assert computed_by(engine, prompt) == 49, "asking stored nothing"
    assert why(engine, prompt)["cause"] == "complete"
    assert why(engine, prompt[:30] + text(2, 20))["known_tokens"] == 28


def test_what_the_store_has_is_told_before_it_is_brought_up(make: Make, tmp_path: Path) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB", "prefetch": "wait_complete", "explain": True}
    first, prompt = make(**store), text(1, 45)
    computed_by(first, prompt)
    first.close()
    second, before = make(**store), 0
    found = why(second, prompt)
    assert (found["cause"], found["tier"], found["restore_tokens"], found["store_tokens"]) == ("in_store", "store", 0, 44)
    assert second.computed - before == 5, "the request itself is served as any other"


def test_nobody_is_told_about_another_salt(make: Make) -> None:
    engine, prompt = make(explain=True), text(1, 45)
    computed_by(engine, prompt, cache_salt="a")
    assert why(engine, prompt, cache_salt="b")["cause"] == "never_stored"
    assert why(engine, prompt, cache_salt="a")["cause"] == "complete"


def test_nobody_is_told_about_another_adapter(make: Make, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(name.encode() * 10)
    engine, prompt = make(explain=True), text(1, 45)
    computed_by(engine, prompt, lora_request=Lora(1, str(tmp_path / "a"), "a"))
    for more in ({}, {"lora_request": Lora(2, str(tmp_path / "b"), "b")}):
        found = why(engine, prompt, **more)
        assert found["cause"] == "never_stored" and "another" not in found["says"]


def test_a_request_is_refused_an_explanation_where_nobody_may_ask(make: Make) -> None:
    engine, prompt = make(), text(1, 45)
    computed_by(engine, prompt)
    refused = engine.submit(prompt, kv_transfer_params=WHY)
    assert engine.connector._scheduler._seen[refused.request_id].question is None
    found = why(engine, prompt)
    assert list(found) == ["says"] and '"explain": true' in found["says"]
    assert not engine.connector._scheduler._seen


def test_a_question_of_an_aborted_request_is_cancelled_and_a_reset_asks_again(make: Make, tmp_path: Path) -> None:
    engine, prompt = make(explain=True, store=f"log:{tmp_path}", store_budget="64MiB", prefetch="wait_complete"), text(1, 45)
    computed_by(engine, prompt)
    cache = engine.connector._scheduler.cache
    cache.flush()
    aborted, waiting = (engine.submit(prompt, kv_transfer_params=WHY) for _ in range(2))
    seen = [engine.connector._scheduler._seen[each.request_id] for each in (aborted, waiting)]
    asked = [each.question for each in seen]
    engine.abort(aborted)
    engine.connector.reset_cache()
    assert all(each is not None and each._call.is_off for each in asked)
    assert seen[0].question is None is seen[1].question
    wait_until(lambda: (engine.step(), seen[1].question)[1])  # once it is known which weights the engine has
    engine.run()
    assert waiting.returned is not None and waiting.returned["stepwell"]["cause"] == "in_store"


def test_requests_that_do_not_ask_or_cannot_be_cached(make: Make) -> None:
    engine, prompt = make(explain=True), text(1, 45)
    for params in (None, {}, {"stepwell_explain": "yes"}, {"other": 1}):
        request = engine.submit(prompt, kv_transfer_params=params)
        engine.run()
        assert request.returned is None
    assert "without the cache" in why(engine, prompt, prompt_embeds=object())["says"]


def test_a_request_that_asked_may_be_aborted_preempted_or_fail_to_load(make: Make) -> None:
    engine, prompt = make(explain=True), text(1, 45)
    computed_by(engine, prompt)
    engine.abort(engine.submit(prompt, kv_transfer_params=WHY))
    engine.submit(prompt, kv_transfer_params=WHY)
    engine.step()
    (job,) = engine.copies[0].pending
    engine.copies[0].answer(job, error="fails on purpose")
    engine.run()
    assert engine.done[-1].returned is not None and engine.done[-1].returned["stepwell"]["cause"] == "complete"
    assert len(engine.pool.free) == len(engine.pool.blocks) - 1
