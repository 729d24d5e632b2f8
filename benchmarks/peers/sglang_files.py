"""SGLang's file backend under orders: one JSON order a line on standard input, one JSON answer a line on standard output.

    {"do": "write", "names": [...]}    -> {"wall_s": ..., "cpu_s": ...}     and "read" and "exists" likewise

Driven as SGLang's cache controller does: 128 pages a call, read into fresh pages that are then copied into the host pool.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from sglang_shim import declare_box_operators

library = declare_box_operators()

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402

BATCH = 128


def backend_in(directory: str) -> HiCacheFile:
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="bench",
        extra_config={"file_storage_path": directory},
    )  # fmt: skip
    return HiCacheFile(config)


def main() -> None:
    directory, value_bytes, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    backend = backend_in(directory)
    source = torch.randint(0, 256, (count, value_bytes), dtype=torch.uint8)
    pool = torch.zeros((count, value_bytes), dtype=torch.uint8)

    def write(names: list[str]) -> None:
        for at in range(0, count, BATCH):
            assert backend.batch_set(names[at : at + BATCH], list(source[at : at + BATCH]))

    def read(names: list[str]) -> None:
        for at in range(0, count, BATCH):
            fresh = [torch.zeros(value_bytes, dtype=torch.uint8) for _ in range(BATCH)]
            for page, got in enumerate(backend.batch_get(names[at : at + BATCH], fresh), at):
                assert got is not None
                pool[page].copy_(got)

    def exists(names: list[str]) -> None:
        assert backend.batch_exists(names) == len(names)

    orders: dict[str, Callable[[list[str]], None]] = {"write": write, "read": read, "exists": exists}
    answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        orders[order["do"]](order["names"])
        took = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
        if order["do"] == "read":
            assert torch.equal(source, pool)
        answer(took)


def answer(words: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
