"""Known bugs of earlier systems, groups I to L: ranks that disagree, silence, cost that grows, and sizes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import stepwell
from stepwell import Kind, Lease, LeaseState, NoRoom, Point, StateSpec, Tier, WritePolicy
from stepwell.base.tasks import Plan, Purpose
from stepwell.transfer.copy_engine import Work
from stepwell.tree import eviction_order
from stepwell.tree.evictable import EvictableSuffixes
from toys import EVICTIONS, FULL, FULL_POINT, HYBRID, KV, OBJECT_BYTES, SMALL_PAGES, Rig, model, text


def test_every_rank_runs_the_same_plan_on_the_same_pages() -> None:
    """I-2: space is found once, in one place; ranks cannot differ in what they could allocate."""
    rig = Rig(HYBRID, device_pages=48, host_pages=24, ranks=3)
    seen: list[list[Plan]] = [[], [], []]
    for rank, copy_engine in enumerate(rig.executor._ranks):
        copy_engine.begin = _watched(copy_engine.begin, seen[rank])  # type: ignore[method-assign]
    for name in range(8):
        rig.serve([*text(1, 8), *text(name, 9)])
    assert len(seen[0]) > 8
    assert [id(plan) for plan in seen[0]] == [id(plan) for plan in seen[1]] == [id(plan) for plan in seen[2]]


@pytest.mark.parametrize("purpose", [Purpose.SAVE, Purpose.LOAD])
@pytest.mark.parametrize("laggard", [0, 1, 2])
def test_a_lagging_rank_delays_visibility_for_all(purpose: Purpose, laggard: int) -> None:
    """I-3: ranks may answer at different times; nothing is there for anybody until the last one answered."""
    rig = Rig(HYBRID, host_pages=64, ranks=3)
    prompt = text(1, 17)
    lease = rig.ready(prompt)
    rig.compute(lease, 16, last=True)
    if purpose is Purpose.LOAD:
        rig.cache.release(lease)
        rig.settle()
        rig.evict_all(Tier.DEVICE)
        lease = rig.open(prompt)
    jobs = rig.pending(purpose)
    assert jobs
    for job in jobs:
        for rank in {0, 1, 2} - {laggard}:
            rig.executor.answer(job, rank)
    assert rig.cache.step().completed == 0
    assert _seen_below(rig, prompt, lease, purpose) is False
    for job in jobs:
        rig.executor.answer(job, laggard)
    rig.cache.step()
    assert _seen_below(rig, prompt, lease, purpose) is True
    rig.cache.release(lease)
    rig.idle_check()


def test_same_calls_give_the_same_victims_whatever_the_hash_seed() -> None:
    """I-5: decisions depend on calls and completions alone, never on the order of a hash table."""
    digests = {_run_traced(seed) for seed in ("0", "1", "4711")}
    assert len(digests) == 1


def test_nothing_probes_for_abilities() -> None:
    """J: a method that is missing must fail loudly: nothing in the package asks `hasattr` or hides an AttributeError.

    Connectors may ask objects of other packages, whose settings differ by model and release; never our own.
    """
    package = Path(stepwell.__file__).parent
    for path in sorted(set(package.rglob("*.py")) - set((package / "connectors").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                probing = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
                assert not probing, f"{path.name}:{node.lineno} probes for an ability"
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
                assert node.type.id != "AttributeError", f"{path.name}:{node.lineno} swallows an AttributeError"


def test_a_miss_is_never_silent() -> None:
    """J: whatever was dropped, skipped or failed is counted, and the prompt it concerns can be asked about."""
    rig = Rig(HYBRID, host_pages=8)  # too small to save a whole prompt
    prompt = text(1, 41)
    rig.serve(prompt)
    assert rig.cache.counters["save_skipped_no_room"] > 0
    rig.evict_all(Tier.DEVICE)
    assert "evicted" in str(rig.cache.explain(prompt)) and rig.cache.counters["evicted_device_pages"] > 0


@pytest.mark.parametrize("policy", EVICTIONS)
def test_evicting_costs_the_same_in_a_small_and_in_a_large_tree(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """K: operations on the order per evicted page, counted; the same with 50 leaves and with 1,500."""
    costs = [_evictions(monkeypatch, leaves, policy) for leaves in (50, 1500)]
    assert costs[0] > 0 and costs[1] <= costs[0] * 1.5 + 1, f"operations per evicted page: {costs}"


def test_busy_nodes_are_looked_at_once_not_at_every_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """K: nodes that requests hold are passed by once; the next request for space does not go through them again."""
    rig = Rig(FULL, device_pages=512)
    leases = []
    for name in range(100):
        rig.serve(text(name, 5))
        leases.append(rig.ready(text(name, 6)))
    first, second = _ops_of_a_sweep(monkeypatch, rig), _ops_of_a_sweep(monkeypatch, rig)
    assert first >= 100 and second <= 2, f"{first=} {second=}"
    for lease in leases:
        rig.cache.release(lease)
    rig.idle_check()
    rig.evict_all(Tier.DEVICE)
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 0, "what was passed by came back when its lease was released"


def test_touching_what_is_cached_costs_the_order_nothing() -> None:
    """K: a hit on the device moves no entry of the eviction order; it is put right when it surfaces."""
    rig = Rig(HYBRID, device_pages=512)
    for name in range(50):
        rig.serve(text(name, 17))
    entries = len(rig.tree.ranking._orders[Tier.DEVICE].runs)
    for _ in range(20):
        rig.cache.release(rig.ready(text(7, 17)))
    assert len(rig.tree.ranking._orders[Tier.DEVICE].runs) <= entries + 2


def test_an_impossible_request_evicts_nothing() -> None:
    """K: a prompt that can never fit is refused at once, and costs no other request anything."""
    for host_pages in (None, 64):
        rig = Rig(HYBRID, device_pages=64, host_pages=host_pages)
        rig.serve(text(1, 17))
        with pytest.raises(NoRoom, match="can never fit"):
            rig.open(text(2, 4 * 65))
        rig.cache.audit()
        assert rig.cache.lookup(text(1, 17)).device_tokens == 16


@pytest.mark.parametrize("write", list(WritePolicy))
def test_host_smaller_than_device_still_serves(write: WritePolicy) -> None:
    """L: a host that cannot mirror the device holds what fits, and never makes the device worse."""
    rig = Rig(FULL, device_pages=64, host_pages=8, write=write)
    for name in range(10):
        rig.serve(text(name, 17))
    assert rig.serve(text(9, 17)).computed == 1
    assert rig.cache.stats().tier(Tier.HOST).used_bytes <= 8 * OBJECT_BYTES


def test_memory_moves_between_kinds_without_a_ratio() -> None:
    """L: no memory is reserved for points: one tier is all prefix pages now, and mostly checkpoints later."""
    big = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=8 * OBJECT_BYTES, dtype="u8")
    rig = Rig(model(KV, big), device_pages=256)
    rig.serve(text(1, 4 * 230 + 1))
    mostly_prefix = rig.used(Tier.DEVICE, Kind.PREFIX)
    for name in range(2, 60):
        rig.clock.advance(3600)
        rig.serve(text(name, 5))
        assert rig.cache.stats().tier(Tier.DEVICE).used_bytes <= 256 * OBJECT_BYTES
    assert mostly_prefix >= 230
    assert rig.used(Tier.DEVICE, Kind.POINT) * 8 > 256 // 2


# ---- helpers ----------------------------------------------------------------------------------------


def _watched(begin, seen):  # type: ignore[no-untyped-def]
    def wrapped(plan: Plan) -> Work:
        seen.append(plan)
        return begin(plan)

    return wrapped


def _seen_below(rig: Rig, prompt: list[int], lease: Lease, purpose: Purpose) -> bool:
    if purpose is Purpose.LOAD:
        return lease.state is LeaseState.READY
    node = rig.cache.lookup(prompt).path[-1]
    host = node.runs[Tier.HOST]
    (checkpoint,) = (node.checkpoints or {}).values()
    assert host is not None
    visible = host.num_ready == 4, checkpoint.ready_in(Tier.HOST) is not None
    assert visible[0] == visible[1]
    return visible[0]


def _run_traced(hash_seed: str) -> str:
    script = Path(__file__).with_name("traced_run.py")
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.strip()) == 32, done.stdout
    return done.stdout


class _Ops:
    """Counts what eviction does: pushes and pops on the order, and searches for evictable suffixes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module, name in ((eviction_order, "heappush"), (eviction_order, "heappop"), (EvictableSuffixes, "of")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, function):  # type: ignore[no-untyped-def]
        def wrapped(*args, **options):  # type: ignore[no-untyped-def]
            self.count += 1
            return function(*args, **options)

        return wrapped


def _evictions(monkeypatch: pytest.MonkeyPatch, leaves: int, policy: str) -> float:
    rig = Rig(FULL_POINT, device_pages=4 * leaves, tuning=replace(SMALL_PAGES, eviction=EVICTIONS[policy]))
    for name in range(leaves):
        rig.clock.advance(1)
        rig.serve_without_audit([*text(0, 4), *text(name + 1, 5)])
    before = rig.used(Tier.DEVICE, Kind.PREFIX)
    with monkeypatch.context() as patch:
        ops = _Ops(patch)
        rig.shrink(Tier.DEVICE, 20)
        return ops.count / (before - rig.used(Tier.DEVICE, Kind.PREFIX))


def _ops_of_a_sweep(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> int:
    with monkeypatch.context() as patch:
        ops = _Ops(patch)
        rig.evict_idle(Tier.DEVICE)
        return ops.count
