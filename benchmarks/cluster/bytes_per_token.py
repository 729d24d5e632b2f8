"""Bytes that a token takes in device memory, host memory and the store, at one, two and four ranks. What ranks keep alike is on
the host and in the store once.

    make bench-ranks        prints the table, behind that of messages (some minutes)

Real engines over small random models: a Llama, whose key-value heads ranks share (with more ranks than heads, some have the same
one), DeepSeek-V3.2, whose latents and index keys every rank has, and DeepSeek-V4, whose rows, windows and open groups are
everybody's too. One prompt is computed, saved and stored; a checkpoint counts as bytes of its tokens.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from gpu.shapes import LLAMA, make
from stepwell.base.config import StoreConfig
from stepwell.base.ids import Tier
from stepwell.engine import Engine, EngineConfig
from stepwell.engine.building.build import open_and_build
from stepwell.store.memory import MemoryStore

MODELS = {
    "Llama, 2 key-value heads": LLAMA,
    "DeepSeek-V3.2, latents": "deepseek-v3.2-shaped",
    "DeepSeek-V4, its own rows": "deepseek-v4-shaped",
}
RANKS = (1, 2, 4)
TOKENS = 1024  # whole pages
PATIENCE_S = 120.0


def run() -> dict[str, Any]:
    """By model and number of ranks."""
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="bench-bytes-") as folder:
        for title, name in MODELS.items():
            written = _write(name, Path(folder) / name)
            found[title] = {ranks: _measure(written, ranks) for ranks in RANKS}
    return found


def _write(name: str, folder: Path) -> Path:
    folder.mkdir()
    model = make(name, "cpu", tiny=True).model
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in model.state_dict().items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


def _measure(model: Path, ranks: int) -> dict[str, float]:
    config = EngineConfig(
        device="cpu", dtype="fp32", device_memory="16MiB", host_memory="32MiB", store="memory:", tensor_parallel=ranks,
        store_config=StoreConfig(checkpoint_delay_s=0),
    )  # fmt: skip
    with open_and_build(str(model), config)[1] as engine:
        rng = random.Random(0)
        engine.generate([rng.randrange(512) for _ in range(TOKENS)], max_tokens=1)
        _settle(engine)
        (store,) = engine.stores
        assert isinstance(store, MemoryStore)
        used = {tier: engine.cache.stats().tier(tier).used_bytes for tier in (Tier.DEVICE, Tier.HOST)}
        return {
            "device of a rank": used[Tier.DEVICE] / TOKENS,
            "host": used[Tier.HOST] / TOKENS,
            "store": store.used_bytes / TOKENS,
        }


def _settle(engine: Engine) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        report = engine.cache.step()
        if not report.running and not report.storing:
            return
        assert time.monotonic() < deadline_s, "it is still copying or storing"
        time.sleep(0.001)


def main() -> None:
    found = run()
    lines = [f"{'bytes per token':<28}{'ranks':>6}{'device of a rank':>18}{'host':>10}{'store':>10}"]
    for title, by_ranks in found.items():
        for ranks, each in by_ranks.items():
            lines.append(f"{title:<28}{ranks:>6}{each['device of a rank']:>18,.0f}{each['host']:>10,.0f}{each['store']:>10,.0f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
