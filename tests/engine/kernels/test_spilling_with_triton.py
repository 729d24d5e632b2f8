"""Engines whose rows are on the host alone, with slots and copies by Triton: the bits and the figures of plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")
from engine.drafted import target
from engine.kernels.chosen import use_kernels
from engine.small import DEFAULTS, run
from parity.recorded import PAGE, Played, Recorded
from parity.spilling import press, prompts, recorded, report, short, spilled
from parity.test_spilled_rows import check_same
from stepwell.base.ids import Kind
from stepwell.engine import EngineConfig, GenerateRequest, Limits, Sampling, build_engine
from stepwell.engine.building import build
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.on_triton.rows import write_rows
from stepwell.sparse.triton_fetch import fetch
from stepwell.sparse.triton_read import read
from stepwell.sparse.triton_resolve import resolve
from stepwell.transfer.copy_engine import PageMemory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there, the engine uses these itself (tests/gpu)")
SMALL = {"memory": "1MiB", "host_memory": "400KiB"}  # the interpreter copies all of it for each launch
FAST = Kernels(resolve=resolve, fetch=fetch, read_spilled=read, write_rows=write_rows)


def over_one_block(memory: PageMemory, kind: Kind) -> torch.Tensor:
    """Pages of all kinds lie in the same memory: Triton's interpreter, which copies it, must know that it is the same."""
    rows = memory.rows(kind)
    return torch.frombuffer(memory.block, dtype=torch.uint8).as_strided(rows.shape, rows.strides)


def played(made: Recorded) -> list[Played]:
    """Two prompts, and one of them again with a few tokens more, which are computed in one pass."""
    first = made.play_all(prompts((80, 40)), answer=2)
    return first + made.play_all([[*first[0].prompt, *first[0].tokens, 1, 2, 3]], answer=2)


@pytest.mark.parametrize(
    ("family", "hot_rows", "kv_dtype"),
    [
        ("deepseek_v32", 0, "fp32"),
        ("deepseek_v32", 2 * PAGE, "fp32"),
        ("glm_moe_dsa", PAGE, "fp32"),
        ("glm_moe_dsa", 2 * PAGE, "fp8"),
    ],
)
def test_triton_finds_and_fetches_the_same_rows(
    family: str, hot_rows: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, plain = recorded(family, kv_dtype=kv_dtype), spilled(family, hot_rows=hot_rows, kv_dtype=kv_dtype, **SMALL)
    use_kernels(monkeypatch, lambda: FAST)
    monkeypatch.setattr(build, "as_tensor", over_one_block)
    fast = spilled(family, hot_rows=hot_rows, kv_dtype=kv_dtype, **SMALL)
    then = played(one)
    check_same(played(plain), then)
    check_same(played(fast), then)
    assert report(fast) == report(plain) and report(fast).misses
    for each in (one, plain, fast):
        each.close()


@pytest.mark.parametrize(("selector", "hot_rows"), [("quest", 7 * PAGE), ("clusterkv", 2 * PAGE)])
def test_triton_finds_and_fetches_the_same_keys_and_values(selector: str, hot_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Picked by summaries, for all heads at once."""
    picking = {"sparse": selector, "sparse_budget": 112}
    small = SMALL | {"memory": "1800KiB", "host_memory": "1MiB", "max_running": 2}
    one, plain = recorded("llama", **picking), spilled("llama", hot_rows=hot_rows, **small, **picking)
    use_kernels(monkeypatch, lambda: FAST)
    monkeypatch.setattr(build, "as_tensor", over_one_block)
    fast = spilled("llama", hot_rows=hot_rows, **small, **picking)

    def asked(made: Recorded) -> list[Played]:
        first = made.play_all(prompts((150,)), answer=2)
        return first + made.play_all([[*first[0].prompt, *first[0].tokens, 1, 2, 3]], answer=2)

    then = asked(one)
    check_same(asked(plain), then)
    check_same(asked(fast), then)
    assert report(fast) == report(plain) and report(fast).misses
    for each in (one, plain, fast):
        each.close()


def test_triton_finds_and_fetches_the_same_rows_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses of the model's own layer: several query rows of a request in one launch."""
    made, limits = short(target("deepseek_v32", own_layer=True)), Limits(chunk_tokens=64, max_running=2)
    ask = GenerateRequest(tokens=prompts((80,))[0], sampling=Sampling(max_tokens=8, logprobs=1))
    settings = DEFAULTS | {"draft": "mtp", "limits": limits, "device_memory": "1MiB", "host_memory": "600KiB"}
    answers, reports = [], []
    for kernels in (None, FAST):
        if kernels is not None:
            use_kernels(monkeypatch, lambda: FAST)
            monkeypatch.setattr(build, "as_tensor", over_one_block)
        with build_engine(made, EngineConfig(**settings, sparse="dsa", hot_rows=2 * PAGE)) as engine:
            press(engine)
            (deltas,) = run(engine, [ask])
            assert deltas[-1].usage is not None and deltas[-1].usage.proposed_tokens > 0
            answers.append([(each.token, each.logprob) for delta in deltas for each in delta.logprobs])
            reports.append(report(engine))
    assert answers[1] == answers[0] and len(answers[0]) == 8
    assert reports[1] == reports[0] and reports[0].misses
