"""Prompts of Transformers models resume exactly: the same bits as the pass that saved them, and the logits of the model alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from connectors.tiny_models import FAMILIES, HYBRIDS, PAGE, generated, logits, opened, prompt, tiny, uncached  # noqa: E402
from stepwell import PlacementConfig  # noqa: E402
from stepwell.base.ids import Kind  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402

TOLERANCE = 1e-4  # of logits with a spread of about 1


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def log(directory: Path) -> dict[str, object]:
    return {"store": f"log:{directory}", "store_options": {"budget": "64MiB"}}


def test_a_prompt_resumes_from_host_and_disk_with_the_bits_that_were_saved(family: str, tmp_path: Path) -> None:
    model, ids = tiny(family), prompt(1, 150)
    with opened(model, self_test=True, **log(tmp_path)) as prompts:
        cold, none = logits(prompts, ids)
        warm, cached = logits(prompts, ids)
    assert (none, cached) == (0, 144) and torch.equal(warm, cold)
    assert float((cold - uncached(model, ids, cold.shape[1])).abs().max()) < TOLERANCE
    with opened(model, **log(tmp_path)) as prompts:  # as after a restart
        stored, cached = logits(prompts, ids)
        assert prompts.stats().counters["tokens_store"] == 144
    assert cached == 144 and torch.equal(stored, cold)


def test_a_longer_prompt_resumes_where_the_known_one_ends(family: str) -> None:
    model, ids = tiny(family), prompt(2, 131)
    with opened(model) as prompts:
        prompts.prefill(ids[:, :81])
        rest, cached = logits(prompts, ids)
    assert cached == 80 and float((rest - uncached(model, ids, rest.shape[1])).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "mamba2"])  # its generate() is refused
def test_answers_are_those_of_the_model_alone(family: str) -> None:
    model, ids = tiny(family), prompt(3, 70, rows=2)
    expected = generated(model, ids)
    with opened(model) as prompts:
        for _ in range(2):
            assert torch.equal(prompts.generate(ids, max_new_tokens=6, do_sample=False), expected)
        beams = prompts.generate(ids, max_new_tokens=6, do_sample=False, num_beams=3, num_return_sequences=2)
        assert torch.equal(beams, generated(model, ids, num_beams=3, num_return_sequences=2))


@pytest.mark.parametrize("tokens", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_at_least_one_token_is_left_to_compute(tokens: int) -> None:
    """A cache object that covers the whole prompt would make generate() compute it all again on top."""
    model, ids = tiny("gemma3"), prompt(4, tokens)
    with opened(model) as prompts:
        for _ in range(2):
            past, _ = prompts.prefill(ids)
            assert past.get_seq_length() == prompts.covers(tokens) == (tokens - 1) // PAGE * PAGE
            assert torch.equal(prompts.generate(ids, max_new_tokens=6, do_sample=False), generated(model, ids))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_branch_is_remembered_and_the_next_prompt_resumes_there(family: str) -> None:
    model, shared = tiny(family), prompt(5, 100)
    ways = [torch.cat([shared, prompt(seed, 40)], 1) for seed in (6, 7, 8)]
    with opened(model) as prompts:
        found = [logits(prompts, ids) for ids in ways]
    assert [cached for _, cached in found] == [0, 0, 96]  # the first has its checkpoint at its end, the second where they part
    for ids, (rest, _) in zip(ways, found, strict=True):
        assert float((rest - uncached(model, ids, rest.shape[1])).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", *HYBRIDS])
def test_prompts_of_a_batch_resume_where_all_of_them_can(family: str) -> None:
    model, batch = tiny(family), prompt(9, 120, rows=3)
    interval = PlacementConfig(interval_tokens=2 * PAGE)
    with opened(model, placement=interval) as prompts:
        for row, tokens in ((0, 120), (1, 90), (2, 65)):
            prompts.prefill(batch[row : row + 1, :tokens])
        rest, cached = logits(prompts, batch)
        again, later = logits(prompts, batch)
    assert (cached, later) == (64, 112)
    assert torch.equal(rest[2], again[2])  # of the others, pages that were there before the batch was computed are kept
    for each in (rest, again):
        assert float((each - uncached(model, batch, each.shape[1])).abs().max()) < TOLERANCE


def test_the_same_prompt_twice_in_a_batch_is_cached_once() -> None:
    ids = prompt(10, 60)
    with opened(tiny("falcon_h1")) as prompts:
        both, _ = logits(prompts, torch.cat([ids, ids]))
        used = prompts.stats().tiers
        assert torch.equal(both[0], both[1])
        again, cached = logits(prompts, torch.cat([ids, ids]))
        assert cached == 48 and torch.equal(again, both) and prompts.stats().tiers == used


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_passes_end_at_the_same_tokens_wherever_a_prompt_resumes(family: str) -> None:
    """So bits do not depend on what was cached, as long as it is the end of a pass."""
    model, ids = tiny(family), prompt(11, 150)
    with opened(model, chunk_tokens=3 * PAGE) as prompts:
        cold, _ = logits(prompts, ids)
    with opened(model, chunk_tokens=3 * PAGE) as prompts:
        prompts.prefill(ids[:, : 3 * PAGE + 1])
        resumed, cached = logits(prompts, ids)
    assert cached == 3 * PAGE and torch.equal(cold, resumed)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", Kind.PREFIX),
        ("gemma3", Kind.PREFIX),
        ("gemma3", Kind.WINDOW),
        ("falcon_h1", Kind.PREFIX),
        ("mamba2", Kind.POINT),
    ],
)
def test_a_damaged_value_is_a_miss(family: str, kind: Kind) -> None:
    model, ids, store = tiny(family), prompt(12, 100), MemoryStore()
    with opened(model, store=store) as prompts:
        cold, _ = logits(prompts, ids)
        size = prompts.spec.object_bytes(kind)
    hit = [value for value in store._values.values() if len(value.data) == size]
    assert size and hit
    for value in hit:
        value.data = bytes([value.data[0] ^ 1]) + value.data[1:]
    with opened(model, store=store) as prompts:
        found, cached = logits(prompts, ids)
        assert cached == 0 and torch.equal(found, cold)
        assert sum(count for name, count in prompts.stats().counters.items() if "damaged" in name) > 0


def test_a_flipped_bit_on_disk_is_a_miss_from_there_on(tmp_path: Path) -> None:
    model, ids = tiny("llama"), prompt(13, 100)
    with opened(model, **log(tmp_path)) as prompts:
        past, _ = prompts.prefill(ids)
        page = bytes(prompts._layout.pack_prefix(past, range(3, 4)).numpy().tobytes())
    (segment,) = [path for path in tmp_path.rglob("*") if path.is_file() and page in path.read_bytes()]
    data = bytearray(segment.read_bytes())
    data[data.index(page) + 1000] ^= 4
    segment.write_bytes(data)
    with opened(model, **log(tmp_path)) as prompts:
        found, cached = logits(prompts, ids)
    assert cached == 3 * PAGE and float((found - uncached(model, ids, found.shape[1])).abs().max()) < TOLERANCE


def test_state_in_sixteen_bits_keeps_its_bits() -> None:
    model, ids = deepcopy(tiny("falcon_h1")).to(torch.bfloat16), prompt(14, 60)
    with opened(model, self_test=True) as prompts:
        cold, _ = logits(prompts, ids)
        warm, cached = logits(prompts, ids)
        assert "bfloat16" in {state.dtype for state in prompts.spec.states}
    assert cached == 48 and torch.equal(warm, cold)
