"""The vLLM connector below a toy engine whose blocks are on a GPU: every byte that it reads is checked, as on a CPU."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest
import torch
from toy_runs import Make, computed_by, text
from toy_vllm import MODELS

from not_run import NO_CUDA
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.tasks import Copy, PageIds, Plan, Purpose, Span
from stepwell.connectors.vllm.groups import Group, spec_of
from stepwell.connectors.vllm.orders import Order
from stepwell.connectors.vllm.worker_side import WorkerSide
from waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
LAYERS, BLOCKS, BLOCK_TOKENS, BLOCK_BYTES, PAGE_TOKENS = 4, 64, 16, 16 << 10, 32
LONG = 200_000_000  # cycles: about a tenth of a second


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Blocks whose dimensions do not lie in memory in their order, as those of FLASH_ATTN."""
    return tensor.view(len(tensor), 2, -1).transpose(1, 2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_resumes_from_the_host_on_a_gpu(make: Make, model: str, ranks: int) -> None:
    engine, prompt = make(model, ranks=ranks, device="cuda", seen_as=turned), text(1, 45)
    assert computed_by(engine, prompt) == 49
    assert computed_by(engine, prompt) <= 9
    branch = prompt[:24]
    computed_by(engine, branch + text(2, 21))
    assert computed_by(engine, branch + text(3, 21)) == 49 - 24


@pytest.mark.parametrize("model", MODELS)
def test_conversations_that_branch_in_little_room_on_a_gpu(make: Make, model: str) -> None:
    engine, choose = make(model, blocks=16 * len(MODELS[model]) + 8, device="cuda"), random.Random(7)
    prompts = [text(0, 30)]
    for turn in range(20):
        before = choose.choice(prompts)
        prompts.append(before[: choose.randrange(len(before) // 2, len(before) + 1)] + text(turn + 1, choose.randrange(1, 30)))
        engine.submit(prompts[-1][-60:])
        if turn % 3 == 2:
            engine.run(late=choose.random() < 0.5)
    engine.run()
    assert len(engine.done) == 20


def test_blocks_are_saved_behind_what_the_step_had_queued_and_loaded_elsewhere() -> None:
    names = tuple(f"layer.{number}" for number in range(LAYERS))
    group = Group(number=0, kind=Kind.PREFIX, layers=names, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, dtype="bfloat16")
    spec = spec_of([group], page_tokens=PAGE_TOKENS, row_order="test")
    tensors = {name: torch.zeros(BLOCKS, BLOCK_BYTES // 2, dtype=torch.bfloat16, device="cuda") for name in names}
    bytes_of_page = LAYERS * BLOCK_BYTES * PAGE_TOKENS // BLOCK_TOKENS
    worker = WorkerSide([group], spec, tensors, host_bytes=BLOCKS * bytes_of_page, name=f"cuda-test-{random.getrandbits(48):x}")
    jobs, order = count(1), np.random.default_rng(1)
    pages = np.arange(BLOCKS // 4, dtype=np.int32)

    def copied(blocks_PC: PageIds, *, loads: bool) -> None:
        engine, host = Span(tier=Tier.ENGINE, kind=Kind.PREFIX, ids=blocks_PC), Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=pages)
        copy = Copy(source=host, target=engine) if loads else Copy(source=engine, target=host)
        job = JobId(next(jobs))
        worker.start([Order(plan=Plan(job=job, purpose=Purpose.LOAD if loads else Purpose.SAVE, copies=(copy,)))])
        ended: dict[int, tuple[int, str | None]] = {}

        def all_ended() -> bool:
            ended.update(worker.poll().answers)
            return int(job) in ended

        wait_until(all_ended)
        assert ended[int(job)] == (1, None)

    try:
        for _ in range(5):
            blocks_PC = (order.permutation(BLOCKS - 1)[: 2 * len(pages)] + 1).astype(np.int32).reshape(-1, 2)
            others_PC = (order.permutation(BLOCKS - 1)[: 2 * len(pages)] + 1).astype(np.int32).reshape(-1, 2)
            wanted = {name: torch.randn(tensors[name].shape, device="cuda").bfloat16() for name in names}
            torch.cuda._sleep(LONG)
            for name in names:
                tensors[name].copy_(wanted[name])  # queued behind the sleep: a save that did not wait would find what was there
            copied(blocks_PC, loads=False)
            for tensor in tensors.values():
                tensor.fill_(-1)
            copied(others_PC, loads=True)
            for name in names:
                found, there = (
                    tensors[name][torch.from_numpy(others_PC.reshape(-1).astype(np.int64)).cuda()],
                    blocks_PC.reshape(-1),
                )
                assert torch.equal(found, wanted[name][torch.from_numpy(there.astype(np.int64)).cuda()]), name
    finally:
        worker.close()
