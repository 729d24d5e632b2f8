"""One rank's copies between the engine's blocks and host memory, which the scheduler's process maps too. Decides nothing.

Loads start when a step is sent, saves when it was computed. Both run on threads; `poll` returns what has ended. On CUDA, copies
use streams of their own, saves after the step's queued work (`transfer/torch_copy_engine.py`).
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

CLOSE_S = 10.0  # longest wait for copies in flight at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What ended since the last poll: answers for the scheduler's side, loaded requests, and failed ones."""

    answers: Answers
    loaded: frozenset[str]
    failed: frozenset[str]


class WorkerSide:
    """The copies of one rank. The worker's thread."""

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
        """Refuses saves, and records that not all saves succeeded."""
        self._refused |= {int(order.plan.job): (1, why) for order in orders}
        self._failed_once = True

    def poll(self) -> Ended:
        """What has ended since the last call. Does not wait."""
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
        """Waits for copies in flight, and records the last finished job for the scheduler's side."""
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
    """A layer's blocks as `[block][byte]` over the same memory, in memory order.

    Attention backends permute the dimensions of a block; any permutation is accepted. Raises ConfigError if a block is not one
    run of bytes, or blocks overlap.
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
    """Whether a tensor is contiguous after a permutation of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in _strides(block) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _strides(block: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Stride and size of each dimension; 0 for the meaningless stride of a dimension of size 1."""
    return tuple((stride if size != 1 else 0, size) for stride, size in zip(block.stride(), block.shape, strict=True))


def geometry(groups: Sequence[Group], tensors: Mapping[str, torch.Tensor]) -> str:
    """The layout of values within blocks. Engines with different layouts cannot share blocks."""
    return repr([
        (group.number, number, str(tensors[name].dtype), _strides(tensors[name][0]))
        for group in groups
        for number, name in enumerate(group.layers)
    ])  # fmt: skip
