"""Whole caches in processes of their own, sharing pages and checkpoints through one cluster."""

from __future__ import annotations

from pathlib import Path

from mooncake_cluster import Cluster

CACHE = Path(__file__).parents[1] / "cache_peer.py"


def test_what_one_cache_computed_another_resumes_from(cluster: Cluster) -> None:
    cluster.lend("128mb")
    left, right = (cluster.start(CACHE, "wait_complete", "mooncake:") for _ in range(2))  # however busy the machine is
    assert left.ask("serve", prompt=1, tokens=200)["computed"] == 200
    shared = right.ask("serve", prompt=1, tokens=200)
    assert (shared["store"], shared["computed"]) == (192, 8), "every byte of it was checked there"
    assert right.ask("serve", prompt=1, tokens=200)["device"] == 192
    assert right.ask("serve", prompt=2, tokens=100)["computed"] == 100
    assert left.ask("serve", prompt=2, tokens=100)["store"] == 96


def test_a_cache_goes_on_without_its_cluster(cluster: Cluster) -> None:
    cluster.lend("128mb")
    left, right = (cluster.start(CACHE, "timeout", "mooncake:") for _ in range(2))
    left.ask("serve", prompt=1, tokens=200)
    cluster.master.kill()
    alone = [right.ask("serve", prompt=prompt, tokens=100) for prompt in range(1, 7)]
    assert all(each["computed"] == 100 for each in alone), "a miss, and nothing worse"
    waited_s = sum(each["waited_s"] for each in alone)
    assert waited_s < 10.0, f"{waited_s:.1f} s: calls block for 4.5 s each then, but six requests do not wait for them"
    assert right.ask("serve", prompt=1, tokens=100)["device"] == 96
