"""Which part of a model this process holds, and who has the same bytes: names for shards, from SGLang's storage config. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One process among those that serve a model. Replicas by data parallelism hold the same, and are meant to share."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    dp_rank: int = 0
    replicated: bool = False  # all ranks of tensor parallelism hold the same KV: MLA, DeepSeek-V4
    head_parts: int = 0  # pages are cut by heads into so many parts, over all ranks; 0 for pages that are not

    @property
    def directory(self) -> str:
        """A name of its own for each process."""
        parts = (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size), ("cp", self.cp_rank, self.cp_size))
        names = [f"{name}{rank}of{size}" for name, rank, size in parts if size > 1]
        return "-".join([*names, *([f"dp{self.dp_rank}"] if self.dp_rank else [])]) or "rank0"

    @property
    def stage(self) -> str:
        """What tells shards apart that are not of tensor parallelism."""
        return f"pp{self.pp_rank}/{self.pp_size} cp{self.cp_rank}/{self.cp_size} dcp{self.dcp_rank}/{self.dcp_size}"

    def shard(self, *, replicated: bool, by_heads: bool) -> str:
        """Whose bytes those of a pool are. Two processes with one shard may read each other's."""
        if replicated:
            return f"all {self.stage}"
        if by_heads:
            return f"heads of {self.head_parts} {self.stage}"
        return f"tp{self.tp_rank}/{self.tp_size} {self.stage}"

    @property
    def own_parts(self) -> range:
        """Which parts of a page this rank holds, where pages are cut by heads."""
        count = self.head_parts // self.tp_size
        return range(self.tp_rank * count, (self.tp_rank + 1) * count)


def ranks_of(config: Any, layout: str = "") -> Ranks:
    """From SGLang's `HiCacheStorageConfig`; the layout is the anchor pool's, where that is known."""
    parts = config.tp_lcm_size or 0
    return Ranks(
        tp_rank=config.tp_rank, tp_size=config.tp_size, pp_rank=config.pp_rank, pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank, cp_size=config.attn_cp_size, dcp_rank=config.dcp_rank, dcp_size=config.dcp_size,
        dp_rank=config.dp_rank, replicated=config.is_mla_model,
        head_parts=parts if layout == "page_head" and not config.is_mla_model else 0,
    )  # fmt: skip
