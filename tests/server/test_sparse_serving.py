"""A server whose rows spill: an answer over rows on the host, and what `/cache`, `/metrics` and the dashboard say of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.families import INDEX, LATENT, checkpoint_of, draw_choices
from engine.side_by_side import draw
from server.serving import ADMIN, NAME, PAGE, VOCAB, Running, running
from stepwell.engine import Limits
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.random_hybrid import byte_tokenizer
from waiting import PATIENCE_S

hf = pytest.importorskip("transformers")

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "stepwell.json"
PROMPT = "".join(f"Step {number} leads down to the water. " for number in range(21))
ANSWER, LAYERS, HOT_ROWS = 40, 3, 2 * PAGE


def deepseek() -> Checkpoint:
    """DeepSeek-V3.2 with a token for each byte."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "max_position_embeddings": 1024}
    model = hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**(LATENT | INDEX | sizes)))
    draw(model)
    draw_choices(model)
    return replace(checkpoint_of("deepseek_v32", model.eval().float()), name=NAME, text=byte_tokenizer())


def ask(served: Running) -> str:
    with served.client() as client:
        made = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=ANSWER, temperature=0)
        assert made.usage is not None and made.usage.completion_tokens == ANSWER
        return made.choices[0].text


@pytest.fixture(scope="module")
def resident() -> str:
    """The answer where all rows are on the device."""
    with running(checkpoint=deepseek()) as made:
        return ask(made)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    limits = Limits(chunk_tokens=64, max_running=6)
    with running(
        checkpoint=deepseek(), sparse="dsa", hot_rows=HOT_ROWS, device_memory="720KiB", limits=limits
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
def admin(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {ADMIN}"}) as made:
        yield made


def metrics(admin: httpx.Client) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(admin.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return {(each.name, *each.labels.values()): each.value for each in samples if each.name.startswith("stepwell_sparse")}


def test_an_answer_over_rows_on_the_host_is_told_step_by_step(served: Running, admin: httpx.Client, resident: str) -> None:
    before = admin.get("/cache").json()["sparse"]
    assert before["steps"] == before["misses"] == before["host_pages"] == 0
    assert ask(served) == resident
    found = admin.get("/cache").json()["sparse"]
    assert found == served.on_engine(lambda engine: asdict(engine.spilling))  # type: ignore[arg-type, call-overload]
    assert found["steps"] == ANSWER, "the prompt's last token, which fetches for the first of the answer, and each behind that"
    most = INDEX["index_topk"] * LAYERS
    assert 0 < found["misses"] / found["steps"] < most and found["hits"] > found["read_through"] == 0
    row_bytes = served.engine.cache.spec.state("kv").row_bytes
    assert found["fetched_bytes"] == found["misses"] * row_bytes and found["staged_bytes"] > 0
    shown = metrics(admin)
    assert shown["stepwell_sparse_steps_total",] == found["steps"]
    for name in ("resident", "hits", "misses", "read_through"):
        assert shown["stepwell_sparse_rows_total", name] == found[name]
    assert shown["stepwell_sparse_bytes_total", "fetched"] == found["fetched_bytes"]
    assert shown["stepwell_sparse_bytes_total", "staged"] == found["staged_bytes"]


def test_every_name_on_the_dashboard_is_exported(admin: httpx.Client) -> None:
    named = {*re.findall(r"stepwell_sparse_\w+", DASHBOARD.read_text())}
    assert len(named) == 4 and named == {name for name, *_ in metrics(admin)}
