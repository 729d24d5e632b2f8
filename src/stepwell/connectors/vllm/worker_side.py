"""One rank's copies between the engine's blocks and host memory that the scheduler's process has mapped too. Decides nothing.

Loads begin when a step is given out, saves when it was computed. Both run on threads; `poll` says what has ended. On CUDA copies
go on streams of their own, saves behind what the step had queued (`transfer/torch_copy_engine.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import JobId, Tier
from stepwell.base.spec import ModelSpec
from stepwell.cache.build import layouts_for
from stepwell.connectors.vllm.groups import Group, blocks_per_page
from stepwell.connectors.vllm.orders import Answers, Order
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.transfer.block_tables import BlockTables, LayerBlocks
from stepwell.transfer.shared_memory import SharedBlock
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory

CLOSE_S = 10.0  # that copies which are under way at the end are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What ended since the last look: answers for the scheduler's side, requests that were loaded, and those that were not."""

    answers: Answers
    loaded: frozenset[str]
    failed: frozenset[str]


class WorkerSide:
    """The copies of one rank. Its thread is the worker's."""

    def __init__(
        self, groups: Sequence[Group], spec: ModelSpec, tensors: Mapping[str, torch.Tensor], *, host_bytes: int, name: str
    ) -> None:  # fmt: skip
        """`tensors` are the engine's, `[block, ...]` for each layer. Makes the shared memory `name`. Raises ConfigError."""
        layout = layouts_for(spec, CacheConfig(device_bytes=None, host_bytes=host_bytes))[Tier.HOST]
        layers = [layer for group in groups for layer in _layers(group, spec.page_tokens, tensors)]
        self._shared = SharedBlock.make(name, layout.size_bytes, meaning=geometry(groups, tensors))
        memory = TorchMemory(spec, layout, given=self._shared.view)
        self._copies = ThreadCopyExecutor([TorchCopyEngine({Tier.HOST: memory}, blocks=BlockTables(spec, layers))])
        self._waiting: dict[JobId, str] = {}  # requests by the load they wait for
        self._last_job = 0
        self._unanswered: set[JobId] = set()
        self._refused: Answers = {}
        self._failed_once = False

    def start(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.request is not None:
                self._waiting[order.plan.job] = order.request
            self._last_job = max(self._last_job, order.plan.job)
            self._unanswered.add(order.plan.job)
            self._copies.submit(order.plan)

    def refuse(self, orders: Iterable[Order], why: str) -> None:
        """Answers saves that must not be made, and notes at the end that not all went well, whatever else did."""
        self._refused |= {int(order.plan.job): (1, why) for order in orders}
        self._failed_once = True

    def poll(self) -> Ended:
        """What has ended since the last call. Waits for nothing."""
        loaded, failed = set(), set()
        answers, self._refused = self._refused, {}
        for done in self._copies.answers():
            self._unanswered.discard(done.job)
            self._failed_once |= done.error is not None
            answers[int(done.job)] = (1, done.error)
            request = self._waiting.pop(done.job, None)
            if request is not None:
                loaded.add(request)
                if done.error is not None:
                    failed.add(request)
        return Ended(answers=answers, loaded=frozenset(loaded), failed=frozenset(failed))

    def close(self, *, timeout_s: float = CLOSE_S) -> None:
        """Waits for copies under way, and notes for the scheduler's side how far they came."""
        self._copies.drain(timeout_s)
        self.poll()
        self._shared.note_ended(0 if self._unanswered or self._failed_once else self._last_job)
        self._copies.close()


def _layers(group: Group, page_tokens: int, tensors: Mapping[str, torch.Tensor]) -> list[LayerBlocks]:
    count = blocks_per_page(group, page_tokens)
    return [
        LayerBlocks(state=group.state, layer=number, rows_NB=rows_of(tensors[name], group), blocks_per_page=count)
        for number, name in enumerate(group.layers)
    ]


def rows_of(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A layer's blocks as `[block][byte]`, over the same memory: the bytes of a block in the order in which they lie there.

    Attention backends permute the dimensions of a block. Any permutation is accepted. Raises ConfigError where a block is not one
    run of bytes, or where blocks overlap.
    """
    block, width = tensor[0], tensor.element_size()
    size = block.numel() * width
    step = tensor.stride(0) * width
    if not _is_one_run(block) or size != group.block_bytes or (len(tensor) > 1 and step < size):
        raise ConfigError(
            f"a block of group {group.number} should be one run of {group.block_bytes} bytes, and is {size} bytes of shape "
            f"{list(block.shape)} with strides {list(block.stride())}, {step} bytes before the next block: choose another KV "
            "cache layout, or run without Stepwell"
        )
    raw = torch.tensor([], dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), tensor.storage_offset() * width, (len(tensor), size), (step, 1))


def _is_one_run(block: torch.Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor with permuted dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in _strides(block) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _strides(block: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Stride and size of each dimension; the stride of one entry means nothing."""
    return tuple((stride if size != 1 else 0, size) for stride, size in zip(block.stride(), block.shape, strict=True))


def geometry(groups: Sequence[Group], tensors: Mapping[str, torch.Tensor]) -> str:
    """How values lie inside blocks: where this differs, the blocks of one engine mean nothing to another."""
    return repr([
        (group.number, number, str(tensors[name].dtype), _strides(tensors[name][0]))
        for group in groups
        for number, name in enumerate(group.layers)
    ])  # fmt: skip
