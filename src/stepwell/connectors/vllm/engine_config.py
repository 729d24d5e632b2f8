"""vLLM's configuration: its groups as ours, unsupported settings, the identity of the model, and the scheduler's side built from
it.

Group types are recognized by exact class name. An unknown class is refused, because a subclass may lay out the same bytes
differently. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import SystemClock
from stepwell.base.spec import ModelSpec
from stepwell.cache.build import build_cache, layouts_for
from stepwell.connectors.vllm.groups import Group, Names, spec_of
from stepwell.connectors.vllm.orders import StepOrders
from stepwell.connectors.vllm.scheduler_side import SchedulerSide
from stepwell.connectors.vllm.settings import Settings
from stepwell.connectors.weight_files import files_digest
from stepwell.store.api import Store
from stepwell.store.key_file import read_store_key
from stepwell.store.registry import open_store
from stepwell.transfer.copy_engine import PageMemory
from stepwell.transfer.shared_memory import SharedBlock

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
NEEDED_ROLE = "kv_both"
AUTO_LENGTH = -1  # `--max-model-len auto`
ATTENTION_IN_GENERATION = "attn_temperature_tuning"  # Llama 4; the other settings there only affect sampling


def groups_of(kv_cache_config: Any, *, is_cpu: bool) -> tuple[Group, ...]:
    """vLLM's groups as ours. Raises ConfigError for groups that cannot be restored exactly."""
    return tuple(_group(number, group, is_cpu=is_cpu) for number, group in enumerate(kv_cache_config.kv_cache_groups))


def _group(number: int, group: Any, *, is_cpu: bool) -> Group:
    spec = group.kv_cache_spec
    why = _refusal(group, is_cpu=is_cpu)
    if why is not None:
        raise ConfigError(f"Stepwell does not cache group {number} of this model ({len(group.layer_names)} layer(s)): {why}")
    name, window = type(spec).__name__, 0
    if name == "MambaSpec":
        kind, size, dtype = Kind.POINT, spec.state_content_size_bytes, spec.dtypes
    else:
        kind, size, dtype = Kind.PREFIX, spec.unpadded_page_size_bytes, spec.dtype
        if name == "SlidingWindowSpec":
            kind, window = Kind.WINDOW, spec.sliding_window + spec.extra_retained_tokens
    return Group(
        number=number, kind=kind, layers=tuple(group.layer_names), block_tokens=spec.block_size, block_bytes=size,
        dtype=f"{dtype} {spec!r}", window_tokens=window,
    )  # fmt: skip


def _refusal(group: Any, *, is_cpu: bool) -> str | None:
    """Why a group cannot be cached; None if it can."""
    spec, name = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if group.is_eagle_group or group.host_resident or not group.enable_kv_transfer:
        return "it belongs to a draft model, or is not on the device"
    if name == "MambaSpec":
        off = spec.mamba_cache_mode != "align"
        return "prefix caching of its recurrent state is off: start vLLM with --enable-prefix-caching" if off else None
    if name not in (*FULL, "SlidingWindowSpec"):
        return f"its type {name} is not supported"
    if spec.tokens_per_state != 1:
        return "it keeps one row for several tokens"
    if name in FULL and (spec.attention_chunk_size is not None or spec.non_causal):
        return "its attention is in chunks, or not causal"
    if name == "MLAAttentionSpec" and is_cpu:
        return "on a CPU, vLLM's MLA ignores loaded blocks and answers wrongly: run this model on a GPU"
    return None


def must_load_and_save(vllm_config: Any) -> None:
    """Raises ConfigError for a `kv_role` other than both. If steps overlap, vLLM protects freed blocks from loads while a step
    may still write them, but only if the role includes loading.
    """
    role = vllm_config.kv_transfer_config.kv_role
    if role != NEEDED_ROLE:
        raise ConfigError(
            f'kv_role is {role!r}: with Stepwell set it to "{NEEDED_ROLE}" in --kv-transfer-config, since one engine saves and '
            "loads; with another role, vLLM's writes and our loads could collide"
        )


def check_engine(vllm_config: Any) -> None:
    """Raises ConfigError for unsupported settings, and says what to set."""
    must_load_and_save(vllm_config)
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(f"Stepwell does not support {name} {getattr(parallel, name)} yet: set it to 1")
    if vllm_config.speculative_config is not None:
        raise ConfigError("Stepwell does not support speculative decoding yet: leave speculative_config out")


def publishes_events(vllm_config: Any) -> bool:
    """Whether KV events are enabled (`--kv-events-config`)."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def model_identity(vllm_config: Any, identity: str | None, *, version: str, device_type: str) -> str:
    """Everything but layout and tokens that must agree before pages may be shared. Raises ConfigError if weights have no name.

    `identity` is the operator's name for the weights, if their files cannot be read.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_json_string()
    weights = identity or files_digest(Path(model.model)) or getattr(model.hf_config, "_commit_hash", None)
    if vllm_config.load_config.load_format == "dummy":
        weights = f"random {model.seed}"
    if weights is None:
        raise ConfigError(
            f'{model.model!r} has no readable weights to identify it: set "identity" in kv_connector_extra_config, '
            'next to "store", to a text that changes with the weights, such as the revision'
        )
    ranks, cache_dtype = vllm_config.parallel_config.tensor_parallel_size, vllm_config.cache_config.cache_dtype
    facts = [version, device_type, weights, model.dtype, model.quantization, config, ranks, cache_dtype]
    facts += [_length(model), model.quantization_config, sorted(model.model_class_overrides.items())]
    facts += [model.override_generation_config.get(ATTENTION_IN_GENERATION), vllm_config.additional_config]
    media = model.multimodal_config
    if media is not None:  # preprocessing of media
        facts += [media.mm_processor_kwargs, media.media_io_kwargs, media.video_pruning_rate, media.video_pruning_method]
    return " ".join(map(str, facts))


def _length(model: Any) -> object:
    """The context length the model was built with. Some models choose rotary embeddings or attention scales by it (LongRoPE,
    Llama 4), so that keys depend on it. A later reduction to fit memory does not count.
    """
    return "auto" if model.original_max_model_len == AUTO_LENGTH else model.max_model_len


# Assumed prefill speed before the first measurement: higher than most models reach, so that nothing is fetched that would be
# computed sooner. On a GPU some first prompts are therefore computed although the store has them.
FIRST_TOKENS_PER_S = {"cpu": 2_000.0}
FIRST_TOKENS_PER_S_ELSEWHERE = 200_000.0
FIRST_PASS_TOKENS = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What follows from an engine's configuration and the settings. The same for the scheduler's side and every rank."""

    vllm_config: Any
    kv_cache_config: Any
    settings: Settings
    groups: tuple[Group, ...]
    page_tokens: int
    version: str  # vLLM's
    device_type: str

    @property
    def num_ranks(self) -> int:
        return int(self.vllm_config.parallel_config.tensor_parallel_size)

    @property
    def vocab_size(self) -> int:
        return max(int(self.vllm_config.model_config.get_vocab_size()), 1)

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank."""
        return self.settings.host_bytes // self.num_ranks

    @property
    def host_spec(self) -> ModelSpec:
        """The spec for sizes only: the layout of rows is unknown until workers report it."""
        return spec_of(self.groups, page_tokens=self.page_tokens, row_order="")

    def shared_name(self, rank: int) -> str:
        """The name of the shared memory that a rank creates and the scheduler's side opens."""
        engine = self.vllm_config.kv_transfer_config.engine_id
        whose = f"{engine} {self.vllm_config.parallel_config.data_parallel_rank}"
        return f"{blake2b(whose.encode(), digest_size=12).hexdigest()}-{rank}"

    def open_shared(self) -> list[SharedBlock]:
        """The host memory of all ranks, created by the workers before. Raises ConfigError."""
        config = CacheConfig(device_bytes=None, host_bytes=self.host_bytes)
        size = layouts_for(self.host_spec, config)[Tier.HOST].size_bytes
        return [SharedBlock.open(self.shared_name(rank), size) for rank in range(self.num_ranks)]

    def scheduler_side(self, shared: Sequence[SharedBlock]) -> tuple[SchedulerSide, Store | None]:
        """The scheduler's side and its store, which the caller must close. Raises ConfigError."""
        settings = self.settings
        spec = self._spec(shared)
        config = CacheConfig(device_bytes=None, host_bytes=self.host_bytes, placement=settings.placement)
        layout, clock = layouts_for(spec, config)[Tier.HOST], SystemClock()
        memories = [PageMemory(spec, layout, block.view) for block in shared]
        orders = StepOrders(self.num_ranks, clock)
        identity = model_identity(self.vllm_config, settings.identity, version=self.version, device_type=self.device_type)
        cache = build_cache(spec, config, executor=orders, host_pages=memories, clock=clock, model=identity)
        store = None
        if settings.store is not None:
            key = read_store_key(settings.store_key_file) if settings.store_key_file is not None else None
            store = open_store(settings.store, options=settings.store_options)
            cache.store.attach(store, replace(settings.store_config, key=key))
            speed = FIRST_TOKENS_PER_S.get(self.device_type, FIRST_TOKENS_PER_S_ELSEWHERE)
            cache.computed([(0, FIRST_PASS_TOKENS)], FIRST_PASS_TOKENS / speed)
        return SchedulerSide(cache, orders, Names(self.groups, spec), clock, audit=settings.audit), store

    def _spec(self, shared: Sequence[SharedBlock]) -> ModelSpec:
        meanings = {block.meaning for block in shared}
        if len(meanings) > 1:
            raise ConfigError("this engine's workers have different KV cache layouts: use one attention backend on all")
        row_order = f"vllm {self.kv_cache_config.kv_cache_layout} {meanings.pop()}"
        return spec_of(self.groups, page_tokens=self.page_tokens, row_order=row_order)
