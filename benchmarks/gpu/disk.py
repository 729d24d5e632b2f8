"""First tokens of a prompt whose state is on the disk, compared with a plain read of as many bytes, without the page cache."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping

from engine.driving import first_token, leave_in, settle
from gpu.bench import Bench
from gpu.limits import file_bytes_per_s
from gpu.requests import warm_up
from gpu.shapes import QWEN
from report import Goal, Row
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.tiers.lease import Sources
from store.page_cache import chill

LENGTH = 32_768
ROUNDS = 3
GOAL = 0.9


def measure(bench: Bench) -> list[Row]:
    made, length, directory = bench.make(QWEN), bench.tokens(LENGTH), bench.directory / "disk"
    memory = bench.bytes_of(made, length + 4096)
    engine = bench.engine(
        made, device_bytes=memory, host_bytes=2 * memory,  # half of it takes what is fetched for requests that have not begun
        store=f"log:{directory}",
        store_options={"budget": str(max(2 * memory, 1 << 30))},
        # Without this setting the cache would compute, which takes about as long on this machine.
        store_config=StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0, recompute_tokens_per_s=1),
    )  # fmt: skip
    del made
    bench.clean()
    try:
        warm_up(bench, engine)
        (prompt,) = bench.prompts(1, length + 1, engine.vocab_size)
        cold = first_token(engine, prompt)
        settle(engine)
        bench.say(f"{length:,} tokens: computed in {cold.seconds:.2f} s, and stored")
        found = []
        for _ in range(ROUNDS):
            leave_in(engine, "disk")
            settle(engine)
            chill([path for path in directory.rglob("*") if path.is_file()])
            found.append(first_token(engine, prompt))
        size = int(length * engine.footprint.bytes_per_token)
        note = _note([each.sources for each in found], length, engine.cache.counters.snapshot())
    finally:
        engine.close()
        shutil.rmtree(directory, ignore_errors=True)
    took_s, plain = statistics.median(each.seconds for each in found), file_bytes_per_s(bench.directory, size)
    speed = max(plain.values())
    figures = {
        "first token, ms": took_s * 1e3, "GB": size / 1e9, "GB/s": size / took_s / 1e9, "cold, s": cold.seconds,
        **{f"plain, {how}, GB/s": each / 1e9 for how, each in plain.items()}, "of plain": size / took_s / speed,
    }  # fmt: skip
    return [Row(what=f"{length:,} tokens", figures=figures, note=note, goal=Goal(value=size / took_s / speed, limit=GOAL))]


def _note(sources: list[Sources], length: int, counts: Mapping[str, int]) -> str:
    """Where not everything came from the store: what did, and what the cache counted."""
    if all(each.store == length for each in sources):
        return ""
    why = {name: count for name, count in counts.items() if name.startswith(("backup", "prefetch", "fetched", "store"))}
    return f"of {length:,} tokens {[each.store for each in sources]} came from the store: {why}"
