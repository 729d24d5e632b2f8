"""Passes of prompts on a GPU that are queued before the pass before them is read: nothing of it shows in answers or in the cache,
and the device does run behind the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.small import greedy, prompt, run, small, tokens_of  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import Recorded, distance, same_bits, script  # noqa: E402
from stepwell.engine import Engine  # noqa: E402
from stepwell.engine.requests.request import Chunk  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
FAMILIES = ["llama", "mistral", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v4"]
DTYPES = ["fp32", "bf16"]  # with plain torch, and with kernels
MEMORY = {"device_memory": "16MiB", "host_memory": "16MiB"}


def log_of(engine: Engine) -> list[str]:
    """What the engine does with passes that have prompts, from now on, in order: queues one, or has read one."""
    log: list[str] = []
    run_pass, take = engine._runner.run, engine._answering.take

    def queued(chunks: Sequence[Chunk], **more: Any) -> Any:
        log.append("queue")
        return run_pass(chunks, **more)

    def taken(computed: Any) -> None:
        take(computed)
        log.append("read")

    engine._runner.run, engine._answering.take = queued, taken  # type: ignore[method-assign]
    return log


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_every_chunk_is_queued_before_the_one_before_it_is_read(family: str, dtype: str) -> None:
    on_cuda: dict[str, Any] = {"device": "cuda", "dtype": dtype, **MEMORY}
    asks = [greedy(prompt(300 + at, seed=at), 8) for at in range(3)]
    with small(family, **on_cuda) as engine:
        assert engine.passing.reads_later, "decode steps of this family ask the host"
        engine.passing.reads_later = False
        expected = [tokens_of(deltas) for deltas in run(engine, asks)]
    with small(family, **on_cuda) as engine:
        log = log_of(engine)
        assert [tokens_of(deltas) for deltas in run(engine, asks)] == expected
        assert log[:2] == ["queue", "queue"] and log.count("queue") - log.count("read") <= 1
        twice = sum(one == "queue" == other for one, other in pairwise(log))
        assert twice == 1, "every pass but the first is queued and the one before it is read; else some were read before"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_were_read_later_resume_from_the_host_to_the_same_bits(family: str, dtype: str) -> None:
    at_once = Recorded(family, device="cuda", dtype=dtype)
    at_once.engine.passing.reads_later = False
    expected = script(at_once, seed=3)
    at_once.close()
    later = Recorded(family, device="cuda", dtype=dtype)
    for then in expected:
        later.evict_to_host()
        now = later.play(then.prompt)
        assert now.resumed == then.resumed and same_bits(now, then), f"differs by {distance(now, then)}"
    later.close()
