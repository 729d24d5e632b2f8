"""A process whose engine keeps its cache in the cluster by one of the connectors. Run by `Cluster.start`.

Its second argument says which, its third is the file that the store is opened from, as operators name it. vLLM and SGLang are
stand-ins that know every byte they should get back.

hicache         {"do": "save"}                          -> pages stored of each pool
                {"do": "find"}                          -> the lengths, in pages, that all pools have
                {"do": "read"}                          -> of each pool, which pages came with every byte
                {"do": "where", "page": 3}              -> the space of a page of keys and values, its label, and the key
linker          {"do": "save"}, {"do": "read"}          -> how many pages came, every byte of them checked
vllm            {"do": "serve", "tokens": 45}           -> how many tokens were computed, and how many the store had
transformers    {"do": "serve", "tokens": 100}          -> how many tokens were cached, and the digest of the logits behind them
all             {"do": "close"}
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "connectors")]

from waiting import wait_until  # noqa: E402

PAGES = 6
MODEL = "all"  # of the toy for vLLM: full attention, windows and recurrent state
FAMILY = "falcon_h1"


class Hicache:
    """SGLang's L3: keys and values, an index, windows, Mamba state, a draft's."""

    def __init__(self, store: str, **changes: Any) -> None:
        import sglang_backends
        import sglang_stand_in

        sys.modules.update(sglang_stand_in.install())
        from stepwell.connectors.sglang import StepwellHiCache

        self._made = sglang_backends
        extra = {"store": store, "identity": "tiny weights"}
        self._backend = sglang_backends.hybrid(StepwellHiCache, extra=extra, **changes)
        self._names = sglang_backends.keys(PAGES)

    def save(self) -> dict[str, int]:
        for seed, pool in enumerate(self._backend.registered_pools.values()):
            self._made.fill(pool, seed)
        stored = {"kv": self._backend.batch_set_v1(self._names, self._made.slots(*range(PAGES)), self._made.info([]))}
        stored |= self._backend.batch_set_v2(self._others(), self._made.info([]))
        return {name: sum(pages) for name, pages in stored.items()}

    def find(self) -> list[int]:
        found = self._backend.batch_exists_v2(self._names, self._others(), self._made.info([]))
        return list(found.restorable_prefix_pages)

    def read(self) -> dict[str, list[bool]]:
        wanted = {name: self._made.fill(pool, seed) for seed, (name, pool) in enumerate(self._backend.registered_pools.items())}
        for pool in self._backend.registered_pools.values():
            pool.kv_buffer.zero_()
        came = {"kv": self._backend.batch_get_v1(self._names, self._made.slots(*range(PAGES)))}
        came |= self._backend.batch_get_v2(self._others())
        return {
            name: [there and self._is_same(name, page, wanted[name]) for page, there in enumerate(pages)]
            for name, pages in came.items()
        }

    def where(self, page: int) -> list[str]:
        pages = self._backend.pages
        return [pages.space.digest.hex(), pages.space.label, pages.pool("kv").keys(self._names[page])[0].hex()]

    def close(self) -> None:
        self._backend.close()

    def _others(self) -> list[Any]:
        sizes = {name: pool.page_size for name, pool in self._backend.registered_pools.items() if name != "kv"}
        return [self._made.transfer(name, self._names, *range(PAGES), size=size) for name, size in sizes.items()]

    def _is_same(self, name: str, page: int, wanted: Any) -> bool:
        at = (slice(None), page) if wanted.ndim == 3 else page
        return self._made.same(self._backend.registered_pools[name].kv_buffer[at].contiguous(), wanted[at].contiguous())


class Linker:
    """SGLang's external linker, with Mamba state."""

    def __init__(self, store: str) -> None:
        import sglang_linker_stand_in as sglang

        sys.modules.update(sglang.install())
        from stepwell.connectors.sglang import StepwellLinker

        self._engine = sglang.Engine(StepwellLinker, "mamba", extra={"store": store, "identity": "tiny weights"})
        self._names, self._requests = sglang.page_keys(PAGES), 0

    def save(self) -> bool:
        self._engine.save(self._names)
        wait_until(self._engine.linker.num_completed_offloads, "a save")
        wait_until(lambda: not self._engine.linker.stats()["to_store"], "stores")
        return bool(self._engine.linker.pop_completed_offload())

    def read(self) -> int:
        self._requests += 1
        request = f"r{self._requests}"
        found = self._names[: max(self._engine.lookup(self._names, request), default=0)]
        if found:
            assert self._engine.queue(found, request) and self._engine.run() and self._engine.is_exact(found)
        return len(found)

    def close(self) -> None:
        self._engine.linker.close()


class Vllm:
    """The connector for vLLM below the toy, which asserts every byte that it reads."""

    def __init__(self, store: str) -> None:
        import vllm_stand_in

        vllm_stand_in.install()
        from toy_vllm import LateCopies, ToyEngine

        from stepwell.connectors.vllm import worker_side
        from stepwell.connectors.vllm.connector import StepwellConnector

        worker_side.ThreadCopyExecutor = LateCopies  # type: ignore[assignment, misc]
        self._engine = ToyEngine(StepwellConnector, MODEL, store=store, prefetch="wait_complete")

    def serve(self, tokens: int) -> dict[str, float]:
        from toy_runs import computed_by, counters, text

        computed = computed_by(self._engine, text(1, tokens))
        return {"computed": computed, "store": counters(self._engine).get("tokens_store", 0)}

    def close(self) -> None:
        self._engine.close()


class Transformers:
    """The prompt cache for a tiny model."""

    def __init__(self, store: str) -> None:
        from tiny_models import PAGE, WAIT, tiny

        from stepwell.connectors.transformers import PromptCache

        settings = {"page_tokens": PAGE, "store": store, "store_config": WAIT, "self_test": False}
        self._prompts = PromptCache(tiny(FAMILY), host_memory="16MiB", **settings)

    def serve(self, tokens: int) -> dict[str, Any]:
        from tiny_models import logits, prompt

        found, cached = logits(self._prompts, prompt(1, tokens))
        wait_until(lambda: self._prompts.stats().storing == 0, "stores")
        self._prompts.audit()
        return {"cached": cached, "digest": hashlib.sha256(found.contiguous().numpy().tobytes()).hexdigest()}

    def close(self) -> None:
        self._prompts.close()


CONNECTORS = {"hicache": Hicache, "linker": Linker, "vllm": Vllm, "transformers": Transformers}


def main() -> None:
    changes = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    connected: Any = CONNECTORS[sys.argv[2]](f"mooncake:{sys.argv[3]}", **changes)
    answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        answer(getattr(connected, order.pop("do"))(**order))


def answer(words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
