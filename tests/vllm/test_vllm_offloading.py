"""vLLM's own offloading with Stepwell's store beneath its host tier: exact or a miss, in the next process too."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tiny_vllm_models import make, make_adapter
from vllm_engines import answers, life, offloading, run, scheduled, text

PROMPT = text(1, 300)
CACHED = {"llama": 288, "gemma3": 288, "falconh1": 256}  # whole blocks of 32 tokens, or 64
HAS_BF16 = platform.machine() != "aarch64" or " bf16" in Path("/proc/cpuinfo").read_text()
OTHER_DTYPE = "bfloat16" if HAS_BF16 else "float16"  # vLLM for Arm ends in an illegal instruction on cores without bf16


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", CACHED)
def test_a_second_process_resumes_from_the_store(models: Path, tmp_path: Path, name: str) -> None:
    model = make(name, models)
    alone, first = run(life(model, [[PROMPT]]), life(model, [[PROMPT]], kv=offloading(tmp_path)))
    (second,) = run(life(model, [[PROMPT]], kv=offloading(tmp_path)))
    assert answers(alone) == answers(first) == answers(second)
    assert scheduled(alone) == scheduled(first) == [315] and scheduled(second) == [315 - CACHED[name]]
    assert min(first["counters"]["write_values"], second["counters"]["read_values"]) >= 5
    assert second["hits"] == {"disk": CACHED[name]}, "vLLM counts them as hits of the tier below"


def test_two_ranks_resume_what_two_ranks_saved(models: Path, tmp_path: Path) -> None:
    """A chunk holds the parts of all ranks; the scheduler's process has the store."""
    model, multi = make("llama", models), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    llm = {"tensor_parallel_size": 2}
    (alone,) = run(life(model, [[PROMPT]], llm=llm), **multi)
    (first,) = run(life(model, [[PROMPT]], llm=llm, kv=offloading(tmp_path)), **multi)
    (second,) = run(life(model, [[PROMPT]], llm=llm, kv=offloading(tmp_path)), **multi)
    assert answers(alone) == answers(first) == answers(second)
    assert second["rounds"][0]["answers"][0]["cached"] == 288


def test_one_flipped_bit_is_a_miss(models: Path, tmp_path: Path) -> None:
    model = make("llama", models)
    (first,) = run(life(model, [[PROMPT]], kv=offloading(tmp_path)))
    size = 32 * 4 * 2 * 64 * 4  # bytes of a chunk: tokens, layers, keys and values, numbers of a token, four bytes each
    segment = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size // 2 if segment.stat().st_size < 16 * size else 4 * size)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    second, third = run(*(life(model, [[PROMPT]], kv=offloading(tmp_path)) for _ in range(2)))
    assert answers(first) == answers(second) == answers(third)
    assert second["counters"]["read_damaged"] == 1
    assert 27 < scheduled(second)[0] < 315, "chunks before the damaged one are used"
    assert scheduled(third) == [27], "the damaged one was deleted, and stored again"


def test_other_weights_dtypes_and_layouts_find_nothing(models: Path, tmp_path: Path) -> None:
    model, store = make("llama", models), tmp_path / "log"
    other = make("llama", tmp_path)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert (other / "config.json").read_text() != config
    kv = offloading(store)
    lives = [
        life(model, [[PROMPT]], kv=kv),
        life(other, [[PROMPT]], kv=kv),
        life(model, [[PROMPT]], kv=kv, llm={"dtype": OTHER_DTYPE}),
        life(model, [[PROMPT]], kv=kv, llm={"block_size": 64}),
        life(model, [[PROMPT]], kv=kv, llm={"hf_overrides": {"rope_theta": 20000.0}}),
        life(model, [[{"tokens": PROMPT, "salt": "a"}]], kv=kv),
        life(model, [[PROMPT]], kv=kv),
    ]
    assert [scheduled(report) for report in run(*lives)] == [[315]] * 6 + [[27]]


def test_adapters_are_apart_by_their_weights(models: Path, tmp_path: Path) -> None:
    """Also when an adapter of the same name in the same place has other weights in the next process."""
    model, folder = make("llama", models), tmp_path / "adapters"
    llm, kv = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, offloading(tmp_path / "log")
    asked = [[{"tokens": PROMPT, "lora": str(make_adapter(1, folder))}]]
    first, second = run(*(life(model, asked, llm=llm, kv=kv) for _ in range(2)))
    assert answers(first) == answers(second) and scheduled(second) == [27]
    weights = "adapter_model.safetensors"
    (folder / "adapter-1" / weights).write_bytes((make_adapter(2, folder) / weights).read_bytes())
    alone, third = run(life(model, asked, llm=llm | {"enable_prefix_caching": False}), life(model, asked, llm=llm, kv=kv))
    assert answers(third) == answers(alone) != answers(first) and scheduled(third) == [315]
