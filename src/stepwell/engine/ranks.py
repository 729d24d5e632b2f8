"""One rank of a tensor-parallel model, and the collectives of a forward pass.

    stream          the same on all ranks, before and after every block
    block           each rank computes its heads and its inner channels: a part of the block's sum
    all_reduce      adds these parts up, after attention and after the feed-forward block
    all_gather      logits; each rank has a part of the vocabulary

There are no other collectives; the cache has none. A single rank does not use torch.distributed. Every call waits for all ranks,
for `timeout_s` at most; then it raises, and the group cannot be used again: the worker process must end.

Ranks with a GPU each are connected by nccl. It does not support two ranks on one GPU: gloo connects these, through host memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepwell.base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKENDS = ("gloo", "nccl")
_LOOPBACK = "127.0.0.1"
_MOST_NAMED = 64  # numbers of ranks that an error message lists


class Share(int):
    """A size that is split over ranks: the integer is this rank's part of `whole`, and begins at `start`.

    Times a plain number it is a share too: heads times head width. Any other operation yields a plain number.
    """

    whole: int
    start: int

    def __new__(cls, size: int, *, whole: int, start: int) -> Share:
        made = super().__new__(cls, size)
        made.whole, made.start = whole, start
        return made

    def __mul__(self, times: int) -> Share:
        assert not isinstance(times, Share), f"an axis cannot be split twice: {self!r} * {times!r}"
        return Share(int(self) * times, whole=self.whole * times, start=self.start * times)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"Share({int(self)} from {self.start} of {self.whole})"

    def in_groups(self, size: int) -> Share | None:
        """The same counted in groups of `size`; None if it does not begin and end on a group boundary."""
        if any(each % size for each in (int(self), self.whole, self.start)):
            return None
        return Share(int(self) // size, whole=self.whole // size, start=self.start // size)


@dataclass(slots=True, eq=False)
class Calls:
    """How many collectives a rank has called, and how many have returned. Ranks with equal numbers of calls are in step."""

    begun: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """Rank `rank` of `size`. `group` connects them; None for a single rank, and for one that only loads weights."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    on_device: bool = True  # whether collectives run on the device; those of gloo go through host memory
    calls: Calls = field(default_factory=Calls)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"ranks count from 0 up to their number, got rank {self.rank} of {self.size}")

    # ---- who has what -----------------------------------------------------------------------------

    def share(self, count: int, what: str) -> int:
        """This rank's equal part of `count` things. If ranks cannot split them, raises ConfigError with the numbers that can."""
        if self.size == 1:
            return count
        if count % self.size:
            fitting = _listed([str(each) for each in range(1, min(count, _MOST_NAMED) + 1) if count % each == 0])
            raise ConfigError(f"--tensor-parallel {self.size} does not divide the {count} {what} of this model; use {fitting}")
        part = count // self.size
        return Share(part, whole=count, start=part * self.rank)

    def share_or_repeat(self, count: int, what: str) -> int:
        """The same, but with fewer things than ranks each rank has one, which it shares with others."""
        if self.size <= count or self.size % count:
            return self.share(count, what)
        return Share(1, whole=count, start=self.rank * count // self.size)

    def share_or_all(self, count: int) -> int:
        """The same, but every rank has all things if they cannot be split equally."""
        return count if count % self.size else self.share(count, "parts")

    # ---- inside a pass ----------------------------------------------------------------------------

    def all_reduce(self, share: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, bit-identical on each. May work in place."""
        if self.size == 1 or not share.numel():
            return share
        near = self._within_reach(share.contiguous())
        self._wait_for(lambda group: group.allreduce([near]))
        return near.to(share.device, non_blocking=True)

    def all_gather(self, part_NX: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, concatenated in rank order. They must have equal sizes."""
        if self.size == 1:
            return part_NX
        if not part_NX.numel():  # a pass without logits
            return torch.cat([part_NX] * self.size, dim=-1)
        near_NX = self._within_reach(part_NX.contiguous())
        parts = [torch.empty_like(near_NX, pin_memory=near_NX.device != part_NX.device) for _ in range(self.size)]
        self._wait_for(lambda group: group.allgather([parts], [near_NX]))
        return torch.cat([each.to(part_NX.device, non_blocking=True) for each in parts], dim=-1)

    def _within_reach(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the group can read and write. gloo would copy a GPU's tensors to the host itself, but writes the result
        on its own thread, which older versions of torch refuse for tensors of inference mode.
        """
        if self.on_device or not tensor.is_cuda:
            return tensor
        near = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return near

    def _wait_for(self, call: Callable[[ProcessGroup], Any]) -> None:
        assert self.group is not None, f"rank {self.rank} of {self.size} was never connected to the others"
        self.calls.begun += 1
        call(self.group).wait()
        self.calls.ended += 1


ALONE = Ranks()


def join(rank: int, size: int, meeting: Path, *, backend: str, timeout_s: float) -> Ranks:
    """Connects this process with the other ranks on this machine. All pass the same `meeting`: a file that does not exist yet, in
    a folder that only trusted processes can write to.

    Waits `timeout_s` at most, and raises RuntimeError after that. gloo listens on the loopback interface only; for nccl the
    parent process sets NCCL_SOCKET_IFNAME=lo. `size` 1 connects nothing. Raises ConfigError for a backend that is unknown or
    not available.
    """
    if size == 1:
        return ALONE
    if backend not in BACKENDS:
        raise ConfigError(f"ranks are connected by one of {', '.join(BACKENDS)}, got {backend!r}")
    dist: Any = importlib.import_module("torch.distributed")  # not imported for a single rank
    if not dist.is_available() or (backend == "nccl" and not dist.is_nccl_available()):
        raise ConfigError(f"this build of torch lacks {backend}, which connects ranks: install one that has it, or use one rank")
    store = dist.FileStore(str(meeting), size)
    store.set_timeout(timedelta(seconds=timeout_s))
    kind = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
    options = kind.Options() if backend == "nccl" else kind._Options()
    options._timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options._devices = [kind.create_device(hostname=_LOOPBACK)]
    group = kind(dist.PrefixStore(backend, store), rank, size, options)
    return Ranks(rank=rank, size=size, group=group, on_device=backend == "nccl")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
