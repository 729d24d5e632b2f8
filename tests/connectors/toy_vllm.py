"""A toy engine that calls a connector as vLLM does: block pools and tables, chunks, preemption, loads between steps.

Its model writes bytes that follow from the tokens so far, and asserts that every byte it reads is one of those: a page, window or
state that was restored wrongly fails at once. Blocks that are freed are reused first, and filled with noise.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm_stand_in as vllm

from stepwell.testing import ScriptedExecutor
from stepwell.transfer.copy_engine import CopyEngine

BLOCK, WINDOW, ROW, STATE = 4, 6, 16, 64  # tokens, tokens, bytes, bytes
_numbers = itertools.count()

FULL = vllm.KVCacheGroupSpec(["full.0", "full.1"], vllm.FullAttentionSpec(BLOCK, 1, ROW))
LONG = vllm.KVCacheGroupSpec(["long.0"], vllm.FullAttentionSpec(2 * BLOCK, 1, ROW))
SWA = vllm.KVCacheGroupSpec(["swa.0"], vllm.SlidingWindowSpec(BLOCK, 1, ROW, sliding_window=WINDOW))
WIDE = vllm.KVCacheGroupSpec(["wide.0"], vllm.FullAttentionSpec(4 * BLOCK, 1, ROW))
WIDE_SWA = vllm.KVCacheGroupSpec(["wide.1"], vllm.SlidingWindowSpec(4 * BLOCK, 1, ROW, sliding_window=5 * BLOCK))
SWA2 = vllm.KVCacheGroupSpec(["swb.0"], vllm.SlidingWindowSpec(BLOCK, 1, ROW, sliding_window=3 * BLOCK))
SSM = vllm.KVCacheGroupSpec(["ssm.0", "ssm.1"], vllm.MambaSpec(BLOCK, ((STATE - 16,), (16,))))
MODELS = {
    "full": [FULL], "windows": [FULL, SWA, SWA2], "recurrent": [FULL, SSM], "all": [SWA, FULL, SSM, SWA2],
    "blocks of two sizes": [FULL, LONG, SWA], "recurrent alone": [SSM],
}  # fmt: skip
WIDE_MODELS = {"wide": [WIDE], "wide, windows": [WIDE, WIDE_SWA]}  # with pages long enough to distinguish media


class LateCopies(ScriptedExecutor):
    """Copies that are made when a test says so. Every worker makes one."""

    made: list[LateCopies] = []  # noqa: RUF012 - reset by each test's engine

    def __init__(self, ranks: list[CopyEngine]) -> None:
        super().__init__(ranks)
        LateCopies.made.append(self)


class ToyModel(torch.nn.Module):
    """What one rank computes with: what its layers write follows from `head`, which is no part of them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in names)
        self.named = dict(zip(names, self.layers, strict=True))
        self.head = torch.nn.Parameter(torch.zeros(5))
        self.register_buffer("scale", torch.ones(()))


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """References and free blocks, as vLLM's."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.blocks[0].is_null = True
        self.free = deque(range(1, count))
        self.on_free: Any = None

    def take(self) -> int:
        block = self.free.popleft()
        self.blocks[block].ref_cnt = 1
        return block

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} is free"
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.appendleft(block.block_id)
                self.on_free(block.block_id)


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    answer_tokens: int
    cache_salt: str | None = None
    prompt_embeds: Any = None
    mm_features: tuple[Any, ...] = ()
    pooling_params: Any = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    returned: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    status: str = "waiting"
    tables: list[list[int]] = field(default_factory=list)
    loaded: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    hash_tokens: int = BLOCK

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(self.hash_tokens, self.num_tokens + 1, self.hash_tokens)
        return [_bytes("hash", [*map(ord, self.cache_salt or ""), *self.inputs[:end]], 8) for end in ends]

    @property
    def inputs(self) -> list[int]:
        """What the model sees: tokens, and media in the place of their placeholders."""
        inputs = list(self.all_token_ids)
        for feature in self.mm_features:
            for at in range(feature.mm_position.length):
                seen = _bytes(f"{feature.modality} {feature.identifier}", [at, feature.mm_position.length], 4)
                inputs[feature.mm_position.offset + at] = int.from_bytes(seen, "little") >> 1
        return inputs

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class ToyEngine:
    """One scheduler and its workers in one thread."""

    def __init__(
        self, connector_class: Any, model: str = "full", *, blocks: int = 64, chunk: int = 8, ranks: int = 1,
        events: bool = False, device: str = "cpu", seen_as: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        **extra: Any,
    ) -> None:  # fmt: skip
        """`seen_as` makes of `[block, byte]` what the connector is given: the same memory with other dimensions."""
        LateCopies.made = []
        self.groups, self.chunk, self.num_ranks = (MODELS | WIDE_MODELS)[model], chunk, ranks
        self.kv = SimpleNamespace(kv_cache_groups=self.groups, num_blocks=blocks, kv_cache_layout="toy")
        settings = {"host_memory": "1MiB", "audit": True, "answer_interval_tokens": 8} | extra
        engine_id = f"toy {next(_numbers)}"
        self.models = [ToyModel([name for group in self.groups for name in group.layer_names]) for _ in range(ranks)]

        def make(role: Any, rank: int) -> Any:
            layers = self.models[rank].named
            config = vllm.config(extra=settings, ranks=ranks, rank=rank, engine_id=engine_id, events=events, layers=layers)
            return connector_class(config, role, self.kv)

        self.memory = [self._tensors(blocks, device) for _ in range(ranks)]
        self.workers = [make(vllm.KVConnectorRole.WORKER, rank) for rank in range(ranks)]
        for worker, tensors in zip(self.workers, self.memory, strict=True):
            worker.register_kv_caches({name: seen_as(tensor) for name, tensor in tensors.items()})
        self.copies = LateCopies.made
        self.pool = Pool(blocks)
        self.pool.on_free = self._spoil
        self.connector = make(vllm.KVConnectorRole.SCHEDULER, 0)
        self.connector.bind_gpu_block_pool(self.pool)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.received: dict[str, set[int]] = {}
        self.failed: set[str] = set()
        self.done: list[Request] = []
        self.computed = 0
        self.preemptions = 0
        self.events: list[Any] = []

    def _tensors(self, blocks: int, device: str) -> dict[str, torch.Tensor]:
        tensors = {}
        for group in self.groups:
            for name in group.layer_names:
                size = self._block_bytes(group)
                whole = torch.zeros(blocks, size + 8, dtype=torch.uint8, device=device)  # with padding between blocks
                tensors[name] = whole[:, :size]
        return tensors

    @staticmethod
    def _block_bytes(group: Any) -> int:
        spec = group.kv_cache_spec
        return spec.state_content_size_bytes if type(spec).__name__ == "MambaSpec" else spec.unpadded_page_size_bytes

    def _spoil(self, block: int) -> None:
        for tensors in self.memory:
            for tensor in tensors.values():
                tensor[block] = 0xEE

    # ---- what a user does ---------------------------------------------------------------------------

    def submit(self, tokens: list[int], *, answer: int = 4, **more: Any) -> Request:
        request = Request(
            f"r{next(_numbers)}", list(tokens), answer, prompt_tokens=len(tokens), hash_tokens=self.hash_tokens, **more
        )
        self.connector.on_new_request(request)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "aborted"
        self.connector.request_finished_all_groups(request, tuple(request.tables))
        if request.request_id not in self.loading:
            self._free(request)

    def run(self, *, late: bool = False) -> None:
        """Steps until everything was answered; copies are made at once, or as late as nothing else can go on."""
        for _ in range(10_000):
            if not (self.waiting or self.running or self.loading or self.connector.has_pending_push_work()):
                return
            before = self.computed
            self.step()
            if not late or self.computed == before:  # running requests may wait for saves to release blocks
                self.finish_copies()
        raise AssertionError("it never ends")

    def load_weights(self, value: float, *, rank: int = 0) -> None:
        """One rank's weights are others from now on."""
        self.models[rank].head.data[-1] = value

    def pause(self) -> None:
        """As vLLM does before `sleep` and changes of weights. Nothing may run."""
        assert not self.running and not self.loading
        module = {"__name__": "vllm.v1.engine.core", "connector": self.connector}
        exec("def _reset_caches():\n    assert connector.reset_cache() is not False", module)
        module["_reset_caches"]()

    def finish_copies(self) -> None:
        for copies in self.copies:
            copies.finish_all()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()

    # ---- a step -------------------------------------------------------------------------------------

    def step(self) -> None:
        scheduled = self._schedule()
        tables = {request.request_id: request.tables for request in self.running}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=vllm.KVConnectorBlockState(
                set(tables), lambda name: tuple(list(table) for table in tables[name]), {}
            ),
        )
        metadata = self.connector.build_connector_meta(output)
        for request in self.running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
        said: list[Any] = []
        with self._connectors(said):
            for request in self.running:
                if request.request_id in scheduled:
                    self._compute(request, scheduled[request.request_id])
        self._collect(said)
        for request in [each for each in self.running if each.request_id in scheduled]:
            self._produce(request)

    @contextmanager
    def _connectors(self, said: list[Any]) -> Iterator[None]:
        """What a worker does around its computation; vLLM's does it in a `finally` too."""
        try:
            yield
        finally:
            for worker in self.workers:
                worker.start_load_kv(None)
                worker.wait_for_save()
                said.append((worker.get_transfer_results(set()), worker.build_connector_worker_meta()))
                worker.clear_connector_metadata()

    def _collect(self, outputs: list[Any]) -> None:
        """What the workers say, aggregated as vLLM does."""
        said, failed = None, set()
        for rank, (results, mine) in enumerate(outputs):
            for name in results.finished_recving:
                self.received.setdefault(name, set()).add(rank)
            failed |= results.failed_recving
            said = mine if said is None else said.aggregate(mine) if mine is not None else said
        self.failed |= failed
        if said is not None:
            self.connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=said))
        self.events += self.connector.take_events()
        for name in [name for name, ranks in self.received.items() if len(ranks) == self.num_ranks]:
            del self.received[name]
            self._received(self.loading.pop(name), well=name not in self.failed)
            self.failed.discard(name)

    def _received(self, request: Request, *, well: bool) -> None:
        if request.status == "aborted":
            self._free(request)
        elif well:
            request.num_computed_tokens = min(request.loaded, request.num_tokens - 1)  # the last token gives the next one
            self.waiting.insert(0, request)
            request.status = "loaded"
        else:
            self._free(request)
            request.num_computed_tokens = 0
            request.status = "waiting"
            self.waiting.insert(0, request)

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted meanwhile
            count = self._chunk_of(request)
            has_room = self._allocate(request, request.num_computed_tokens + count)
            while not has_room and request in self.running and not self.connector.has_pending_block_frees():
                self._preempt(self.running[-1], scheduled)
                has_room = request in self.running and self._allocate(request, request.num_computed_tokens + count)
            if not has_room and request in self.running:
                break  # for saves to end, as vLLM does
            if has_room:
                scheduled[request.request_id] = count
        for request in list(self.waiting):
            if len(self.running) >= 3 or not self._admit(request, scheduled):
                continue
        loaded = [request for request in self.waiting if request.status == "loaded"]
        if not self.running and not self.loading and loaded:  # they hold all blocks and none has space to continue
            self._start_over(loaded[-1])
        return scheduled

    def _chunk_of(self, request: Request) -> int:
        """Chunks of a prompt end at multiples of the chunk, so that recurrent state exists there."""
        computed, left = request.num_computed_tokens, request.num_tokens - request.num_computed_tokens
        to_boundary = self.chunk - computed % self.chunk
        last = (request.num_tokens - 1) // self._page() * self._page()
        if computed < last:
            left = min(left, last - computed)
        return min(left, to_boundary)

    def _page(self) -> int:
        return vllm.resolve_kv_cache_block_sizes(self.kv, None)[0]

    @property
    def hash_tokens(self) -> int:
        return vllm.resolve_kv_cache_block_sizes(self.kv, None)[1]

    def _admit(self, request: Request, scheduled: dict[str, int]) -> bool:
        external = 0
        if request.status != "loaded":
            found, is_async = self.connector.get_num_new_matched_tokens(request, 0)
            if found is None:
                return False
            external = 0 if request.skip_reading_prefix_cache else found
            assert bool(external) == is_async or request.skip_reading_prefix_cache, "loads are made between steps only"
        count = 0 if external else self._chunk_of(request)
        request.tables = request.tables or [[] for _ in self.groups]
        if not self._allocate(request, request.num_computed_tokens + external + count, external=external):
            if request.status != "loaded":
                self._free(request)
            return False
        self.connector.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: tuple(list(table) for table in request.tables)), external
        )
        self.waiting.remove(request)
        if external:
            self.connector.get_external_cache_hit_sources(request, external)
            request.loaded, request.status = external, "loading"
            self.loading[request.request_id] = request
            return True
        request.status = "running"
        self.running.append(request)
        scheduled[request.request_id] = count
        return True

    def _allocate(self, request: Request, upto: int, *, external: int = 0) -> bool:
        """Blocks for tokens up to `upto`, all or none; those that are behind are freed first."""
        start = request.num_computed_tokens + external
        for group, table in zip(self.groups, request.tables, strict=True):
            first = self._first_needed(group, start)
            for place in range(min(first, len(table))):
                if table[place]:
                    self.pool.free_blocks([self.pool.blocks[table[place]]])
                    table[place] = 0
        wanted = [
            list(range(len(table), -(-upto // group.kv_cache_spec.block_size)))
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        real = [
            [place >= self._first_needed(group, start) for place in places]
            for group, places in zip(self.groups, wanted, strict=True)
        ]
        if sum(map(sum, real)) > len(self.pool.free):
            return False
        for table, needed in zip(request.tables, real, strict=True):
            table.extend(self.pool.take() if each else 0 for each in needed)
        return True

    @staticmethod
    def _first_needed(group: Any, computed: int) -> int:
        spec = group.kv_cache_spec
        if type(spec).__name__ == "MambaSpec":
            return max(computed - 1, 0) // spec.block_size
        if type(spec).__name__ == "SlidingWindowSpec":
            return max(computed - spec.sliding_window + 1, 0) // spec.block_size
        return 0

    def _preempt(self, request: Request, scheduled: dict[str, int]) -> None:
        self.preemptions += 1
        self.running.remove(request)
        scheduled.pop(request.request_id, None)
        self.waiting.insert(0, request)
        self._start_over(request)

    def _start_over(self, request: Request) -> None:
        self._free(request)
        request.num_computed_tokens, request.status = 0, "waiting"

    def _free(self, request: Request) -> None:
        for table in request.tables:
            self.pool.free_blocks([self.pool.blocks[block] for block in reversed(table)])
        request.tables = []

    # ---- the model ----------------------------------------------------------------------------------

    def _compute(self, request: Request, count: int) -> None:
        upto = request.num_computed_tokens
        since, inputs = upto - count, request.inputs
        self.computed += count
        for rank, tensors in enumerate(self.memory):
            for group, table in zip(self.groups, request.tables, strict=True):
                for name in group.layer_names:
                    weights = f"{rank} {self.models[rank].head[-1].item():g} {name}"
                    self._run_layer(tensors[name], group, table, weights, inputs, since, upto)

    def _run_layer(
        self, tensor: torch.Tensor, group: Any, table: list[int], name: str, tokens: list[int], since: int, upto: int
    ) -> None:  # fmt: skip
        size = group.kv_cache_spec.block_size
        if type(group.kv_cache_spec).__name__ == "MambaSpec":
            if since:
                assert bytes(tensor[table[(since - 1) // size]].tolist()) == _bytes(name, tokens[:since], STATE), (
                    f"state at {since}"
                )
            for end in {*range(since - since % size + size, upto, size), upto}:  # states of boundaries on the way, and of the end
                tensor[table[(end - 1) // size]] = _tensor(name, tokens[:end], STATE)
            return
        first = (
            0
            if type(group.kv_cache_spec).__name__ == "FullAttentionSpec"
            else max(since - group.kv_cache_spec.sliding_window + 1, 0)
        )
        for token in range(first, since):
            row = tensor[table[token // size]][token % size * ROW : (token % size + 1) * ROW]
            assert bytes(row.tolist()) == _bytes(name, tokens[: token + 1], ROW), f"{name}: row {token} of {since}"
        for token in range(max(since, 0), upto):
            tensor[table[token // size]][token % size * ROW : (token % size + 1) * ROW] = _tensor(name, tokens[: token + 1], ROW)

    def _produce(self, request: Request) -> None:
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens - request.prompt_tokens >= request.answer_tokens:
            self.running.remove(request)
            request.status = "finished"
            _, request.returned = self.connector.request_finished_all_groups(request, tuple(request.tables))
            self._free(request)
            self.done.append(request)
            return
        request.all_token_ids.append(self.next_token(request.inputs))

    @staticmethod
    def next_token(tokens: list[int]) -> int:
        return _bytes("next", tokens, 1)[0]


def _bytes(name: str, tokens: list[int], size: int) -> bytes:
    state = blake2b(name.encode(), digest_size=64)
    state.update(np.asarray(tokens, np.int32).tobytes())
    return state.digest()[:size]


def _tensor(name: str, tokens: list[int], size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(name, tokens, size)), dtype=torch.uint8)
