"""Answers over Stepwell are those of vLLM without any cache, token for token and in logprobs, and less is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_vllm_models import MODELS, make
from vllm_engines import Report, answers, life, run, scheduled, stepwell, text

PROMPT = text(1, 300)
CACHED = {"llama": 288, "gemma3": 288, "gptoss": 288, "falconh1": 256}  # whole pages of 32 tokens, or 64


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", MODELS)
def test_a_second_process_resumes_from_the_log(models: Path, tmp_path: Path, name: str) -> None:
    model = make(name, models)
    off = {"llm": {"enable_prefix_caching": False}} if name != "falconh1" else {}
    alone, first = run(
        life(model, [[PROMPT]], **off),
        life(model, [[PROMPT]], kv=stepwell(tmp_path), events=True),
    )
    (second,) = run(life(model, [[PROMPT], [PROMPT[:200] + text(2, 80)]], kv=stepwell(tmp_path), events=True))
    assert answers(first) == answers(alone) and answers(second)[0] == answers(alone)[0]
    assert scheduled(alone) == scheduled(first) == [315]
    assert scheduled(second)[0] == 315 - CACHED[name]
    assert second["rounds"][0]["answers"][0]["cached"] == CACHED[name]
    assert second["counters"]["tokens_store"] >= CACHED[name]
    _check_events(first, {"CPU", "STORAGE"}, CACHED[name] // 64)
    _check_events(second, {"CPU"}, CACHED[name] // 64)


def _check_events(report: Report, media: set[str], num_blocks: int) -> None:
    """In the host's memory and below it, blocks have the hashes and the tokens that vLLM gives its own."""
    own = _told(report, "GPU")
    for medium in media:
        common = _told(report, medium).keys() & own.keys()
        assert len(common) >= num_blocks, f"{medium}: {len(common)} block(s) with hashes of vLLM's"
        assert all(_told(report, medium)[each] == own[each] for each in common)
    assert not [event for event in report["events"] if event["what"] == "BlockRemoved" and event["medium"] in media]


def _told(report: Report, medium: str) -> dict[tuple[int, int], list[int]]:
    """The tokens of blocks that were stored, by group and hash.

    vLLM also reports the tokens of blocks that it left out between others: it is then unknown which tokens belong to which block.
    """
    found = {}
    for event in report["events"]:
        size = event["block_tokens"]
        whole = len(event["tokens"]) == len(event["hashes"]) * size
        if (event["what"], event["medium"]) == ("BlockStored", medium) and whole:
            for at, each in enumerate(event["hashes"]):
                found[event["group"], each] = event["tokens"][at * size : (at + 1) * size]
    return found


def test_of_a_prompt_of_whole_blocks_only_the_last_token_is_computed(models: Path, tmp_path: Path) -> None:
    model, prompt = make("llama", models), text(3, 320)
    alone, _ = run(life(model, [[prompt]]), life(model, [[prompt]], kv=stepwell(tmp_path)))
    (second,) = run(life(model, [[prompt], [prompt + text(4, 40)]], kv=stepwell(tmp_path)))
    assert answers(second)[0] == answers(alone)[0]
    assert scheduled(second)[0] == 16 and second["rounds"][0]["answers"][0]["cached"] == 320
    assert scheduled(second)[1] == 40 + 15


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompts_resume_where_vllms_own_prefix_cache_is_off(models: Path, tmp_path: Path, name: str) -> None:
    """From the log, and from host memory in the same engine."""
    model, off = make(name, models), {"enable_prefix_caching": False}
    alone, _ = run(life(model, [[PROMPT]], llm=off), life(model, [[PROMPT]], llm=off, kv=stepwell(tmp_path)))
    (second,) = run(life(model, [[PROMPT], [PROMPT]], llm=off, kv=stepwell(tmp_path)))
    assert answers(second) == answers(alone) * 2
    assert scheduled(second) == [315 - CACHED[name]] * 2


def test_salts_are_apart(models: Path, tmp_path: Path) -> None:
    model = make("llama", models)
    asked = [[{"tokens": PROMPT, "salt": salt}] for salt in ("a", "b")]
    _, report = run(life(model, asked[:1], kv=stepwell(tmp_path)), life(model, [asked[1], asked[0]], kv=stepwell(tmp_path)))
    assert scheduled(report) == [315, 27]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_resume_what_two_ranks_saved(models: Path, tmp_path: Path, name: str) -> None:
    """The scheduler and both workers are processes of their own; each rank has host memory and values of its own."""
    model = make(name, models)
    llm, multi = {"tensor_parallel_size": 2}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    (alone,) = run(life(model, [[PROMPT]], llm=llm), **multi)
    (first,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path), llm=llm), **multi)
    (second,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path), llm=llm), **multi)
    assert answers(alone) == answers(first) == answers(second)
    assert second["rounds"][0]["answers"][0]["cached"] == CACHED[name]
