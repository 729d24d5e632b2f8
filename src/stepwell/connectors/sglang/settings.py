"""Settings of both SGLang adapters, the rank and the weights of this process, and the store that follows from them.

Settings are in `--hicache-storage-backend-extra-config`, or for the linker in `--unified-cache-external-linker-config`, and are
checked before a store is opened. Imports nothing of SGLang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError, StoreError
from stepwell.connectors.store_settings import (
    STORE_KEYS,
    StoreSettings,
    must_be_known,
    open_verified,
    positive,
    size,
    store_name,
    store_settings,
)
from stepwell.connectors.weight_files import files_digest
from stepwell.verified.store import VerifiedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One of the processes that serve a model. Replicas of data parallelism hold the same pages and share them."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    dp_rank: int = 0
    replicated: bool = False  # all ranks of tensor parallelism hold the same pages: MLA, DeepSeek-V4
    head_parts: int = 0  # number of parts by heads into which a page is cut, over all ranks; 0 for uncut pages

    @property
    def directory(self) -> str:
        """A distinct name for each process."""
        parts = (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size), ("cp", self.cp_rank, self.cp_size))
        names = [f"{name}{rank}of{size}" for name, rank, size in parts if size > 1]
        return "-".join([*names, *([f"dp{self.dp_rank}"] if self.dp_rank else [])]) or "rank0"

    @property
    def stage(self) -> str:
        """The part of a shard's name besides tensor parallelism."""
        return f"pp{self.pp_rank}/{self.pp_size} cp{self.cp_rank}/{self.cp_size} dcp{self.dcp_rank}/{self.dcp_size}"

    def shard(self, *, replicated: bool, by_heads: bool) -> str:
        """The name of a pool's shard. Processes with the same shard may read each other's pages."""
        if replicated:
            return f"all {self.stage}"
        if by_heads:
            return f"heads of {self.head_parts} {self.stage}"
        return f"tp{self.tp_rank}/{self.tp_size} {self.stage}"

    @property
    def own_parts(self) -> range:
        """The parts of a page that this rank holds, if pages are cut by heads."""
        count = self.head_parts // self.tp_size
        return range(self.tp_rank * count, (self.tp_rank + 1) * count)


def ranks_of(config: Any, layout: str = "") -> Ranks:
    """From SGLang's `HiCacheStorageConfig`, and the anchor pool's layout if known."""
    parts = config.tp_lcm_size or 0
    return Ranks(
        tp_rank=config.tp_rank, tp_size=config.tp_size, pp_rank=config.pp_rank, pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank, cp_size=config.attn_cp_size, dcp_rank=config.dcp_rank, dcp_size=config.dcp_size,
        dp_rank=config.dp_rank, replicated=config.is_mla_model,
        head_parts=parts if layout == "page_head" and not config.is_mla_model else 0,
    )  # fmt: skip


_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_PLACE = "--hicache-storage-backend-extra-config"
_OF_LINKER = ("host_memory", "fetch_wait_s", *STORE_KEYS)
_LINKER_PLACE = '"linker_extra_config" in --unified-cache-external-linker-config'
_ONE_PROCESS = "log:"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerSettings:
    """Settings of the linker: host memory, and optionally a store."""

    host_bytes: int
    fetch_wait_s: float
    store: StoreSettings | None


def settings_of(given: Mapping[str, object] | None) -> StoreSettings:
    """Raises ConfigError that says what to write."""
    given = given or {}
    must_be_known(given, STORE_KEYS, _PLACE, ignored=_OF_SGLANG)
    if not given.get("interface_v1"):
        raise ConfigError(f'add "interface_v1": 1 to {_PLACE}: without it SGLang makes two more copies of every page')
    return store_settings(given, _PLACE)


def linker_settings_of(given: Mapping[str, object] | None) -> LinkerSettings:
    """Raises ConfigError that says what to write."""
    given = given or {}
    must_be_known(given, _OF_LINKER, _LINKER_PLACE)
    has_store = store_name(given) is not None
    if not has_store and (unused := [key for key in STORE_KEYS if key in given and key not in ("store", "identity")]):
        raise ConfigError(f'{_LINKER_PLACE} has {unused[0]!r}, but no store: add "store": "log:/var/cache/stepwell"')
    return LinkerSettings(
        host_bytes=size(given, "host_memory"),
        fetch_wait_s=positive(given, "fetch_wait_s", 2.0),
        store=store_settings(given, _LINKER_PLACE) if has_store else None,
    )


def location(settings: StoreSettings, ranks: Ranks) -> str:
    """The store of this rank. A log belongs to one process, so each rank gets a directory of its own within it.

    Raises ConfigError if ranks must share pages, which a log does not permit.
    """
    if not settings.store.startswith(_ONE_PROCESS):
        return settings.store
    if ranks.replicated and ranks.tp_size > 1:
        raise ConfigError(
            f"this model's ranks share their pages, and {settings.store} can be open in one process only: "
            f'use "store": "shared-{settings.store}", or Mooncake ("mooncake:FILE")'
        )
    return f"{settings.store.rstrip('/')}/{ranks.directory}"


NO_WEIGHTS = (
    'this store outlives the process or is shared, so the weights of its pages must be known: add "identity" next to '
    '"store", a text that changes whenever the weights or adapters do'
)
_CHANGES_OUTPUT = (
    "revision", "quantization", "dtype", "kv_cache_dtype", "json_model_override_args", "load_format", "context_length",
    "model_impl", "modelopt_quant", "rl_quant_profile", "mamba_ssm_dtype", "qsa_indexer_dtype",
)  # fmt: skip
_SCALES = "quantization_param_path"  # a file with the scales of eight-bit keys and values
READ = ("model_path", "lora_paths", "speculative_draft_model_path", _SCALES, *_CHANGES_OUTPUT)  # settings of SGLang


def weights_of(server_args: Any, identity: str | None = None) -> str | None:
    """A digest of checkpoint, adapters and settings that change their meaning; None if the checkpoint is unknown.

    `identity` is the operator's name for the checkpoint, if its files are not here.
    """
    path = getattr(server_args, "model_path", None)
    checkpoint = identity or (files_digest(Path(path)) if isinstance(path, str) else None)
    if checkpoint is None:
        return None
    adapters = [(name, files_digest(Path(where))) for name, where in sorted(_adapters(getattr(server_args, "lora_paths", None)))]
    draft = getattr(server_args, "speculative_draft_model_path", None)
    adapters += [("draft model", files_digest(Path(draft)))] if isinstance(draft, str) else []
    settings = [(name, str(getattr(server_args, name, None))) for name in _CHANGES_OUTPUT]
    scales = getattr(server_args, _SCALES, None)
    settings += [(_SCALES, hashlib.blake2b(Path(scales).read_bytes()).hexdigest())] if isinstance(scales, str) else []
    return hashlib.blake2b(repr((checkpoint, adapters, settings)).encode(), digest_size=16).hexdigest()


def _adapters(given: Any) -> list[tuple[str, str]]:
    """Names and paths in each of SGLang's formats: a dictionary, or a list of paths, `name=path`, or objects."""
    if isinstance(given, dict):
        return [(str(name), str(getattr(where, "lora_path", where))) for name, where in given.items()]
    found = []
    for each in given or ():
        where = each.get("lora_path") if isinstance(each, dict) else getattr(each, "lora_path", each)
        name, _, path = str(where).rpartition("=")
        found.append((name, path))
    return found


def open_for_rank(settings: StoreSettings, ranks: Ranks, identity: str | None) -> VerifiedStore:
    """Opens the store of a rank. `identity` names the weights; None if unknown. Raises ConfigError or StoreError."""
    where = location(settings, ranks)
    try:
        store = open_verified(settings, where)
    except StoreError as error:
        hint = f'; if several processes serve, use "store": "shared-{settings.store}"' if where.startswith("log:") else ""
        raise StoreError(f"{error}{hint}") from error
    if identity is None and store.traits.outlives_process:
        store.close()
        raise ConfigError(NO_WEIGHTS)
    return store
