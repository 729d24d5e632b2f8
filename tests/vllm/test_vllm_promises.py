"""What goes wrong costs time, never an answer: stores that are damaged or hang, loads that fail, blocks that are wanted early."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_vllm_models import make, make_adapter
from vllm_engines import answers, life, run, run_to_its_death, scheduled, stepwell, text

PROMPT = text(1, 300)
TRYING = "trying_connector"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def conversations(seed: int = 5, *, talks: int = 6, rounds: int = 4) -> list[list[list[int]]]:
    """Several at once, which share beginnings, grow, and branch."""
    rng = random.Random(seed)
    roots = [rng.choices(range(3, 500), k=rng.randrange(60, 200)) for _ in range(3)]
    prompts = [[*rng.choice(roots), *rng.choices(range(3, 500), k=rng.randrange(10, 60))] for _ in range(talks)]
    asked = []
    for number in range(rounds):
        asked.append([list(prompt) for prompt in prompts])
        for prompt in prompts:
            prompt += rng.choices(range(3, 500), k=rng.randrange(20, 80))
        if number == 1:
            prompts[0] = prompts[1][:150] + prompts[0][150:]
    return asked


@pytest.mark.parametrize(("name", "blocks"), [("llama", 26), ("gemma3", 73), ("gptoss", 32), ("falconh1", 14)])
def test_branching_conversations_on_a_small_pool_with_late_copies(models: Path, tmp_path: Path, name: str, blocks: int) -> None:
    """Six are admitted at once, before it is known that their prompts fit, and the longest alone fills most of the pool."""
    model, asked = make(name, models), conversations()
    common = {"max_model_len": 640, "max_num_seqs": 6}
    (alone,) = run(life(model, asked, llm=common, max_tokens=96))
    kv = stepwell(tmp_path, module=TRYING, answer_interval_tokens=64)
    small = common | {"num_gpu_blocks_override": blocks, "scheduler_reserve_full_isl": False}
    first, second = (
        run(life(model, asked, kv=kv, llm=small, max_tokens=96), TRYING=f"late={late_s}")[0] for late_s in (0.2, 0.02)
    )  # while copies run, vLLM waits for them before it preempts
    assert len(answers(alone)) == 24
    for life_of in (first, second):
        assert [tokens for tokens, _ in answers(life_of)] == [tokens for tokens, _ in answers(alone)]
        # who was preempted computes tokens of its answer together that came one by one: state of Mamba rounds differently then
        sums = [logprob for _, logprob in answers(life_of)]
        assert sums == pytest.approx([logprob for _, logprob in answers(alone)], rel=1e-6)
    assert first["preemptions"] + second["preemptions"] > 0, "the pool has space for all"
    assert sum(scheduled(second)) < sum(scheduled(first)), "the second process found nothing of the first"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_load_that_fails_is_computed(models: Path, tmp_path: Path, name: str) -> None:
    model = make(name, models)
    (first,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path)))
    (second,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path, module=TRYING)), TRYING="fail=1")
    assert answers(second) == answers(first) and scheduled(second) == [315]
    assert 1 <= second["counters"]["load_failures"] <= 2


def test_a_damaged_store_is_a_miss(models: Path, tmp_path: Path) -> None:
    model = make("gptoss", models)
    (first,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path)))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            data = bytearray(path.read_bytes())
            data[20_000::4096] = bytes(byte ^ 1 for byte in data[20_000::4096])
            path.write_bytes(data)
    (second,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path)))
    assert answers(second) == answers(first) and scheduled(second) == [315]


def test_a_store_that_hangs_is_not_waited_for(models: Path, tmp_path: Path) -> None:
    """Its reads take longer than a request waits, and what they bring in the end belongs to no request any more."""
    model = make("falconh1", models)
    (first,) = run(life(model, [[PROMPT]], kv=stepwell(tmp_path)))
    kv = stepwell(tmp_path, module=TRYING, prefetch_timeout_s=0.5)
    (second,) = run(life(model, [[PROMPT], [PROMPT]], kv=kv), TRYING="hang=20")
    assert answers(second) == answers(first) * 2
    assert scheduled(second)[0] == 315 and second["counters"].get("tokens_store", 0) == 0


@pytest.mark.parametrize(("name", "killed"), [("llama", "3,pages"), ("falconh1", "6,checkpoint")])
def test_an_engine_that_is_killed_while_it_saves_is_followed_by_one_that_resumes_exactly_or_misses(
    models: Path, tmp_path: Path, name: str, killed: str
) -> None:
    """In the first save of the second prompt, as soon as the store has acknowledged something of the first to resume from."""
    model, asked = make(name, models), [[text(seed, 300)] for seed in (1, 2, 3)]
    run_to_its_death(life(model, asked, kv=stepwell(tmp_path, module=TRYING)), TRYING=f"kill={killed}")
    alone, after = run(*(life(model, asked, kv=kv) for kv in (None, stepwell(tmp_path))))
    assert answers(after) == answers(alone) and scheduled(alone) == [315] * 3
    assert scheduled(after)[0] <= 315 - 256, "acknowledged, and lost"
    assert scheduled(after)[1:] == [315] * 2, "it was killed before it saved these"


def test_adapters_are_apart(models: Path, tmp_path: Path) -> None:
    """Both in one engine, and in the next one, which finds of each what it saved under its own weights."""
    model = make("llama", models)
    adapters = [str(make_adapter(number, tmp_path / "adapters")) for number in (1, 2)]
    asked = [[{"tokens": PROMPT, "lora": each}] for each in (*adapters, None)]
    llm = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    alone, first, second = run(
        life(model, asked, llm=llm | {"enable_prefix_caching": False}),
        *(life(model, asked, llm=llm, kv=stepwell(tmp_path / "log")) for _ in range(2)),
    )
    assert answers(alone) == answers(first) == answers(second)
    assert len({logprob for _, logprob in answers(alone)}) == 3, "the adapters change nothing"
    assert scheduled(first) == [315] * 3 and scheduled(second) == [27] * 3


def test_engines_built_for_other_lengths_share_nothing(models: Path, tmp_path: Path) -> None:
    """With LongRoPE keys are rotated by the longest prompt that an engine takes: those of another one would be wrong."""
    model, asked = make("phi3", models), [[PROMPT]]
    alone, first, second, third = run(
        life(model, asked, llm={"max_model_len": 1024}),
        life(model, asked, llm={"max_model_len": 512}, kv=stepwell(tmp_path)),
        *(life(model, asked, llm={"max_model_len": 1024}, kv=stepwell(tmp_path)) for _ in range(2)),
    )
    assert answers(first) != answers(alone), "the length changes nothing"
    assert answers(second) == answers(third) == answers(alone)
    assert scheduled(second) == [315] and scheduled(third) == [27]
