"""What `make bench-ranks` measures is there, and ranks take no more host memory and store than one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from cluster import bytes_per_token, messages


def test_messages_are_measured_over_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "STEPS", 20)
    monkeypatch.setattr(messages, "WARM", 2)
    found = messages.run()
    sizes = [found[name]["bytes to each rank"] for name in ("no page tables", "8,192 tokens each", "32,768 tokens each")]
    assert sizes == sorted(sizes) and sizes[1] > 32 * 8192 // 64 * 4, f"page tables travel: {sizes}"
    assert all(found[name]["lowest ms"] > 0 for name in messages.CONTEXTS) and found["added ms"] > 0


def test_a_token_takes_as_many_bytes_on_the_host_and_in_the_store_however_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_per_token, "RANKS", (1, 2))
    monkeypatch.setattr(bytes_per_token, "MODELS", {"latents": bytes_per_token.MODELS["DeepSeek-V3.2, latents"]})
    one, two = bytes_per_token.run()["latents"].values()
    assert one == two and min(one.values()) > 0
