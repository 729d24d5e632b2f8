"""Replays count exactly what a brute-force count says, add up, and repeat themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_traces import (
    BLOCK,
    ListTrace,
    branching,
    checkpointed_resumed,
    distinct_pages,
    lru_resumed,
    request,
    setup,
)

from stepwell.base.config import CacheConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import ManualClock
from stepwell.base.spec import ModelSpec
from stepwell.sim.hardware import Hardware
from stepwell.sim.policies import POLICIES
from stepwell.sim.replay import Replay, replay_trace
from stepwell.sim.report import Report
from stepwell.sim.setup import Setup
from toys import FULL, FULL_POINT, FULL_WINDOW, HYBRID, OBJECT_BYTES

PLENTY = 4096


def replayed(requests: list, using: Setup) -> tuple[Report, list[int], Replay]:
    """The report, the pages that each request resumed, and the replay; audited at the end."""
    replay = Replay(using, block_tokens=BLOCK)
    resumed = [(each.total - each.computed) // BLOCK for each in map(replay.serve, requests)]
    replay.cache.audit()
    return replay.tally.report(trace="t", policy="p", wall_s=0.0), resumed, replay


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [32, 64, 128, 512])
def test_one_tier_of_full_attention_hits_as_plain_lru_does(capacity: int, seed: int) -> None:
    requests = branching(200, seed=seed)
    assert replayed(requests, setup(device_pages=capacity))[1] == lru_resumed(requests, capacity)


@pytest.mark.parametrize("spec", [FULL_WINDOW, FULL_POINT, HYBRID], ids=["window", "point", "hybrid"])
def test_with_endless_memory_hybrids_resume_at_the_deepest_checkpoint(spec: ModelSpec) -> None:
    requests = branching(200, seed=5)
    assert replayed(requests, setup(spec, device_pages=PLENTY))[1] == checkpointed_resumed(requests)


def test_with_endless_memory_full_attention_reaches_the_ceiling() -> None:
    report, _, _ = replayed(branching(300, seed=1, tails=(0, 1, 3)), setup(device_pages=PLENTY))
    assert 0 < report.hit_rate == report.ceiling < 1


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("write", list(WritePolicy))
def test_sources_add_up_whatever_the_tiers(spec: ModelSpec, write: WritePolicy) -> None:
    requests = branching(200, seed=2)
    using = setup(spec, device_pages=64, host_pages=192, store_bytes=1024 * OBJECT_BYTES, write=write)
    report, _, _ = replayed(requests, using)
    by_source = report.device_tokens + report.host_tokens + report.store_tokens + report.computed_tokens
    assert by_source == report.prompt_tokens == sum(each.prompt_tokens for each in requests)
    assert report.host_tokens > 0 or write is WritePolicy.SELECTIVE
    assert report.hit_rate <= report.ceiling


def test_bytes_written_are_pages_times_page_bytes() -> None:
    requests = branching(150, seed=3)
    using = setup(device_pages=64, host_pages=PLENTY, store_bytes=PLENTY * OBJECT_BYTES)
    report, _, _ = replayed(requests, using)
    page_bytes = FULL.object_bytes(Kind.PREFIX)
    assert report.tiers[Tier.HOST].written_bytes == distinct_pages(requests) * page_bytes
    assert report.tiers[Tier.STORE].written_bytes == report.tiers[Tier.STORE].used_bytes == distinct_pages(requests) * page_bytes
    assert report.tiers[Tier.HOST].read_bytes - report.tiers[Tier.STORE].written_bytes == report.tiers[Tier.DEVICE].written_bytes
    assert report.tiers[Tier.DEVICE].written_bytes == report.host_tokens // BLOCK * page_bytes


def test_checkpoints_are_written_once_each() -> None:
    requests = branching(150, seed=3)
    report, _, _ = replayed(requests, setup(FULL_POINT, device_pages=PLENTY, host_pages=PLENTY))
    ends = len({tuple(each.blocks.tolist()) for each in requests})
    assert report.checkpoints_made == ends
    point, page = FULL_POINT.object_bytes(Kind.POINT), FULL_POINT.object_bytes(Kind.PREFIX)
    assert report.tiers[Tier.HOST].written_bytes == ends * point + distinct_pages(requests) * page


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_store_gives_back_what_memory_has_lost(spec: ModelSpec) -> None:
    requests = branching(200, seed=4)
    memory = {"device_pages": 32, "host_pages": 64, "hardware": Hardware(prefill_tokens_per_s=10)}
    without, _, _ = replayed(requests, setup(spec, **memory))
    report, _, _ = replayed(requests, setup(spec, **memory, store_bytes=PLENTY * OBJECT_BYTES))
    assert report.store_tokens > 0
    assert report.tiers[Tier.STORE].read_bytes >= report.store_tokens // BLOCK * OBJECT_BYTES
    assert report.hit_rate > without.hit_rate


def test_a_store_that_is_slower_than_computing_is_not_read() -> None:
    slow = Hardware(prefill_tokens_per_s=1e6, store_latency_s=1)
    memory = {"device_pages": 48, "host_pages": 64, "store_bytes": PLENTY * OBJECT_BYTES}
    report, _, _ = replayed(branching(100, seed=4), setup(**memory, hardware=slow))
    assert report.store_tokens < report.prompt_tokens / 50, "but for what it took to measure it"


def test_the_same_trace_gives_the_same_figures() -> None:
    requests = branching(150, seed=6)
    using = setup(HYBRID, device_pages=96, host_pages=256, store_bytes=512 * OBJECT_BYTES)
    assert replayed(requests, using)[0] == replayed(requests, using)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_replays(name: str) -> None:
    policy = POLICIES[name]
    using = setup(HYBRID, device_pages=64, eviction=policy.eviction, placement=policy.placement)
    assert 0 < replayed(branching(100, seed=7), using)[0].hit_rate < 1


def test_a_prompt_larger_than_the_device_is_computed_and_disturbs_nothing() -> None:
    requests = [request(0, range(10)), request(1, range(100, 164)), request(2, range(10))]
    report, resumed, _ = replayed(requests, setup(device_pages=32))
    assert resumed == [0, 0, 10]
    assert report.too_large == 1


def test_a_last_block_that_is_not_full_is_cached_as_a_whole_one_when_asked() -> None:
    short = replace(request(0, [1, 2, 3]), prompt_tokens=2 * BLOCK + 1)
    for whole, expected in ((False, 2 * BLOCK), (True, 2 * BLOCK + 1)):
        replay = Replay(setup(device_pages=32, whole_blocks=whole), block_tokens=BLOCK)
        replay.serve(short)
        again = replay.serve(replace(short, at_s=1.0))
        assert (again.device, again.total) == (expected, short.prompt_tokens)
        tailed = replace(short, at_s=2.0, prompt_tokens=3 * BLOCK + 3)
        assert replay.serve(tailed).total == replay.serve(replace(tailed, at_s=3.0)).total == 3 * BLOCK + 3


def test_tails_are_shared_by_nobody() -> None:
    replay = Replay(setup(device_pages=64), block_tokens=BLOCK)
    long_tail = replace(request(0, [1]), prompt_tokens=5 * BLOCK)
    assert [replay.serve(replace(long_tail, at_s=float(at))).computed for at in range(2)] == [5 * BLOCK, 4 * BLOCK]


def test_figures_begin_after_the_warm_up() -> None:
    requests = [request(0, [1, 2]), request(1, [1, 2]), request(2, [1, 2])]
    report = replay_trace(ListTrace(requests=requests), setup(device_pages=32), policy="p", clock=ManualClock(), warm_up=1)
    assert (report.requests, report.device_tokens, report.computed_tokens) == (2, 4 * BLOCK, 2)
    assert report.ceiling == report.hit_rate == 16 / 18
    with pytest.raises(ConfigError, match="leaves none"):
        replay_trace(ListTrace(requests=requests), setup(device_pages=32), policy="p", clock=ManualClock(), warm_up=3)


def test_requests_that_come_at_the_same_time_or_out_of_order_are_served_in_turn() -> None:
    requests = [request(5, [1]), request(5, [1]), request(3, [1])]
    assert replayed(requests, setup(device_pages=32))[1] == [0, 1, 1]


def test_the_first_token_comes_after_loads_and_what_is_computed() -> None:
    hardware = Hardware(
        prefill_tokens_per_s=10, prefill_half_tokens=1e30, request_latency_s=1, host_bytes_per_s=OBJECT_BYTES, host_latency_s=0.5
    )
    first, other = request(0, [1, 2]), request(1, range(10, 17))
    using = setup(device_pages=8, host_pages=64, hardware=hardware)
    report, resumed, _ = replayed([first, other, replace(first, at_s=2.0)], using)
    assert resumed == [0, 0, 2]
    # 9 tokens computed: 1.9 s; 29 tokens: 3.9 s; two pages loaded and one token computed: 1 + 2.5 + 0.1 s
    assert report.ttft_p50_s == pytest.approx(3.6)
    assert report.ttft_p99_s == pytest.approx(3.9, rel=0.01)


def test_tiers_of_terabytes_need_no_memory_for_their_bytes() -> None:
    spec = replace(FULL, page_tokens=64, states=(replace(FULL.states[0], row_bytes=2**14),))
    config = CacheConfig(device_bytes=80 * 2**30, host_bytes=2**40)
    replay = Replay(Setup(spec=spec, config=config, store_bytes=4 * 2**40), block_tokens=64)
    assert replay.serve(replace(request(0, range(40)), prompt_tokens=40 * 64 + 1)).computed == 40 * 64 + 1


def test_tiers_that_cannot_stand_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="device tier"):
        Setup(spec=FULL, config=CacheConfig(device_bytes=None, host_bytes=2**20))
    with pytest.raises(ConfigError, match="host"):
        Setup(spec=FULL, config=CacheConfig(device_bytes=2**20), store_bytes=2**30)
