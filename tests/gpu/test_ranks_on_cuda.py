"""Two ranks on one GPU, each a process of its own: they answer as one rank does, from every tier, and share pinned host memory.

NCCL takes no two ranks on one GPU, so these are connected by gloo through host memory.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.worker_engines import WIDE_MEMORY, open_engine  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.base.config import PrefetchPolicy, StoreConfig  # noqa: E402
from stepwell.base.errors import ConfigError  # noqa: E402
from stepwell.base.ids import CACHED_KINDS, Kind, Tier  # noqa: E402
from stepwell.base.inherited_block import InheritedBlock  # noqa: E402
from stepwell.engine import Answer, Engine, Finish, GenerateRequest, Limits, Sampling  # noqa: E402
from stepwell.engine.workers.worker_setup import WorkerLimits  # noqa: E402
from stepwell.jobs.children import start_child  # noqa: E402
from unit.transfer.sharded import Ranks, host_memory, run, span  # noqa: E402
from waiting import run_to_the_end, run_until, settle  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.filterwarnings("ignore:::fla"),  # a warning of the library would count as its failure
]

ONE, TWO = "cuda:0", "cuda:0,cuda:0"
TOLERANCE = 1e-3  # of logprobs in fp32: products on a GPU add up in another order where ranks cut them
FAMILIES = ("llama", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v32", "deepseek_v4")
# In sixteen bits Triton runs most, and FlashInfer what is as wide as real heads.
SIXTEEN = ("llama", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v32", "deepseek_v4", "wide-llama", "wide-deepseek_v32")
FETCHED = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
# Processes on one GPU take turns on it, and every sum waits for both: so passes are few.
FEW_PASSES = Limits(chunk_tokens=128, max_running=4)
LIMITS = WorkerLimits(silent_s=60, pass_s=90, start_s=240)
COMPILES = WorkerLimits(silent_s=60, pass_s=400, start_s=400)  # where `make build-kernels` was not run before
HANGS_S = 150.0  # then it is said what its workers do
PEER = Path(__file__).with_name("pinned_peer.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


ASKED = (prompt(300), prompt(300)[:260] + prompt(40, seed=2))  # V4 can be resumed at 256 here


def opened(family: str, root: Path, ranks: int, dtype: str, **more: Any) -> Engine:
    is_wide = family.startswith("wide-")
    sizes = WIDE_MEMORY if is_wide else {}
    several = {"worker_limits": COMPILES if is_wide else LIMITS} if ranks > 1 else {}
    device = TWO if ranks == 2 else ONE
    return open_engine(family, root, ranks, device=device, dtype=dtype, limits=FEW_PASSES, **{**sizes, **several, **more})


@pytest.fixture(autouse=True)
def tell_what_hangs() -> Iterator[None]:
    """After a while, all workers of this process say what their threads do."""

    def tell() -> None:
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                if b"stepwell.engine.workers" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGUSR1)

    timer = Timer(HANGS_S, tell)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def answers(engine: Engine) -> list[Answer]:
    return [engine.generate(each, max_tokens=4, logprobs=2, ignore_eos=True) for each in ASKED]


def cached(answer: Answer) -> int:
    sources = answer.usage.sources
    assert sources.total == answer.usage.prompt_tokens, sources
    return sources.total - sources.computed


def apart(ours: Answer, theirs: Answer) -> float:
    return max(abs(a.logprob - b.logprob) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))


def same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert apart(one, other) < TOLERANCE, f"logprobs differ by {apart(one, other)}"


def check_kernels(engine: Engine) -> None:
    assert not engine._runner.kernels.failed, engine.kernels


# ---- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_on_one_gpu_answer_as_one_from_every_tier(family: str, root: Path, tmp_path: Path) -> None:
    with opened(family, root, 1, "fp32") as alone:
        expected = answers(alone)
        again = answers(alone)
    store = {"store": f"log:{tmp_path / 'store'}", "store_config": FETCHED}
    with opened(family, root, 2, "fp32", **store) as two:
        assert two.ranks is not None and len(set(two.ranks.pids)) == 2
        same(answers(two), expected)
        from_device = answers(two)
        same(from_device, again)
        assert [cached(each) for each in from_device] == [cached(each) for each in again]
        settle(two.cache)
        two.cache.lose_device()
        from_host = answers(two)
        same(from_host, expected)
        assert from_host[0].usage.sources.host == cached(from_host[0]) > 0, from_host[0].usage.sources
        settle(two.cache)
        two.cache.audit()
        check_kernels(two)
    with opened(family, root, 2, "fp32", **store) as later:  # other processes, and other host memory
        from_store = answers(later)
        same(from_store, expected)
        assert from_store[0].usage.sources.store == cached(from_store[0]) > 0, from_store[0].usage.sources
        settle(later.cache)
        later.cache.audit()
    with opened(family, root, 1, "fp32", **store) as one:  # what two ranks stored serves one
        found = answers(one)
        same(found, expected)
        assert found[0].usage.sources.store == cached(from_store[0])


def prompt_logprobs(engine: Engine) -> list[float]:
    """Logprobs of all tokens of a prompt: they compare the same tokens, whatever the model would answer."""
    answer = engine.generate(prompt(300, seed=5), max_tokens=1, prompt_logprobs=0, use_cache=False)
    return [each.logprob for each in answer.prompt_logprobs]


def median_error(found: Sequence[float], exact: Sequence[float]) -> float:
    return statistics.median(abs(a - b) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("family", SIXTEEN)
def test_two_ranks_in_sixteen_bits_are_as_near_as_one_and_resume_to_the_same_bits(
    family: str, root: Path, tmp_path: Path
) -> None:
    """Most tokens agree: an expert that is chosen by a hair moves a few far away, whichever engine computes it."""
    with opened(family, root, 1, "fp32") as exact:
        expected = prompt_logprobs(exact)
    with opened(family, root, 1, "bf16") as one:
        alone = prompt_logprobs(one)
    store = {"store": f"log:{tmp_path / 'store'}", "store_config": FETCHED}
    with opened(family, root, 2, "bf16", **store) as two:
        error, error_alone = median_error(prompt_logprobs(two), expected), median_error(alone, expected)
        assert error < 1.5 * error_alone + 0.005, f"{error} compared with {error_alone} of one rank"
        answers(two)
        from_device = answers(two)
        settle(two.cache)
        two.cache.lose_device()
        from_host = answers(two)
        settle(two.cache)
        two.cache.audit()
        check_kernels(two)
    with opened(family, root, 2, "bf16", **store) as later:
        from_store = answers(later)
    for resumed, source in ((from_host, "host"), (from_store, "store")):
        assert getattr(resumed[0].usage.sources, source) == cached(resumed[0]) > 0, resumed[0].usage.sources
        for ours, theirs in zip(resumed, from_device, strict=True):
            if cached(ours) == cached(theirs):  # else it was cut into other passes, which round differently
                assert ours.tokens == theirs.tokens and ours.logprobs == theirs.logprobs, f"from the {source}"
    assert any(cached(ours) == cached(theirs) for ours, theirs in zip(from_host, from_device, strict=True)), (
        "nothing was compared"
    )


def test_a_rank_that_is_killed_on_a_gpu_comes_back_with_a_warm_host(root: Path) -> None:
    with opened("gemma3", root, 2, "fp32", restart_workers=True) as engine:
        expected = answers(engine)
        settle(engine.cache)
        number = engine.submit(GenerateRequest(tokens=prompt(200, seed=7), sampling=Sampling(max_tokens=500, ignore_eos=True)))
        run_until(engine, lambda: engine.passes > 12)
        assert engine.ranks is not None
        os.kill(engine.ranks.pids[1], signal.SIGKILL)
        ends = [delta for delta in run_to_the_end(engine) if delta.finish is not None]
        assert [(each.request, each.finish) for each in ends] == [(number, Finish.FAILED)] and "rank 1" in str(ends[0].error)
        found = answers(engine)  # waits for the new ones
        same(found, expected)
        assert found[0].usage.sources.host == cached(found[0]) > 0, found[0].usage.sources
        settle(engine.cache)
        engine.cache.audit()


# ---- memory -------------------------------------------------------------------------------------


def test_ranks_on_one_gpu_share_what_is_free_there(root: Path) -> None:
    free = torch.cuda.mem_get_info(0)[0]
    with opened("llama", root, 2, "bf16", device_memory="4%") as engine:
        each = engine.cache.stats().tier(Tier.DEVICE).size_bytes
        assert 0.01 * free < each < 0.021 * free, f"{each} of {free} for each of two"
        assert len(engine.generate(prompt(100), max_tokens=4, ignore_eos=True).tokens) == 4
    with pytest.raises(ConfigError, match="for each of 2 ranks does not fit"):
        opened("llama", root, 2, "bf16", device_memory=free * 2 // 3)


@pytest.mark.parametrize("kind", CACHED_KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_copy_their_bytes_of_whole_rows_to_a_gpu_and_back(kind: Kind, count: int) -> None:
    host = host_memory()
    assert host.bytes_B.is_pinned()
    whole = torch.randint(0, 256, host.rows(kind).shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    host.rows(kind)[[5, 2]] = whole[[5, 2]]
    on_cpu, on_gpu = Ranks(count, host), Ranks(count, host, device=ONE)
    for ranks in (on_cpu, on_gpu):
        run(ranks.engines, span(Tier.HOST, kind, 5, 2), span(Tier.DEVICE, kind, 1, 7))
    for ours, theirs in zip(on_gpu.devices, on_cpu.devices, strict=True):
        assert torch.equal(ours.rows(kind).cpu(), theirs.rows(kind))
    run(on_gpu.engines, span(Tier.DEVICE, kind, 7, 1), span(Tier.DEVICE, kind, 2, 3))
    host.bytes_B.zero_()
    run(on_gpu.engines, span(Tier.DEVICE, kind, 2, 3), span(Tier.HOST, kind, 3, 4))
    assert torch.equal(host.rows(kind)[[4, 3]], whole[[5, 2]]), "whole rows, whichever rank had them"
    assert int(host.bytes_B.count_nonzero()) == int(whole[[5, 2]].count_nonzero()), "nothing else was written"


def test_host_memory_that_processes_share_is_pinned_in_each_of_them() -> None:
    """Each maps it, registers it with CUDA and adds one to its bytes, on the device; what one writes the others read."""
    block, environment = InheritedBlock(64 << 20), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    block.view[:] = bytes(range(256)) * (block.size_bytes // 256)
    command = [sys.executable, str(PEER), str(block.fd), str(block.size_bytes)]
    talk: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    peers = [start_child(command, pass_fds=[block.fd], env=environment, **talk) for _ in range(2)]
    try:
        for peer in peers:
            assert peer.stdout is not None and peer.stdout.readline() == "pinned\n"
        for peer in peers:  # one after the other, while both have it registered
            said, _ = peer.communicate("add\n", timeout=300)
            assert said == "done\n" and peer.returncode == 0
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    assert bytes(block.view[:4096]) == bytes((each + 2) % 256 for each in range(256)) * 16
    assert bytes(block.view[-256:]) == bytes((each + 2) % 256 for each in range(256))
