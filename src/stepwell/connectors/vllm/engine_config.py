"""What vLLM's configuration says: its groups as ours, what is not supported, and whose bytes are cached. Imports no vLLM.

Kinds of groups are known by the exact names of their classes: one that is not known is refused, since a subclass may keep
something else in the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.connectors.vllm.groups import Group
from stepwell.connectors.weight_files import files_digest

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
NEEDED_ROLE = "kv_both"
AUTO_LENGTH = -1  # of `--max-model-len auto`
ATTENTION_IN_GENERATION = "attn_temperature_tuning"  # of Llama 4: all else there is how tokens are chosen


def groups_of(kv_cache_config: Any, *, is_cpu: bool) -> tuple[Group, ...]:
    """vLLM's groups as ours. Raises ConfigError for kinds whose state would not be restored exactly."""
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
    """Why a group cannot be cached; None where it can."""
    spec, name = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if group.is_eagle_group or group.host_resident or not group.enable_kv_transfer:
        return "it is a draft model's, or not on the device"
    if name == "MambaSpec":
        off = spec.mamba_cache_mode != "align"
        return "prefix caching of its recurrent state is off: start vLLM with --enable-prefix-caching" if off else None
    if name not in (*FULL, "SlidingWindowSpec"):
        return f"it is a {name}, which this version does not know"
    if spec.tokens_per_state != 1:
        return "it keeps one row for several tokens"
    if name in FULL and (spec.attention_chunk_size is not None or spec.non_causal):
        return "its attention is in chunks, or not causal"
    if name == "MLAAttentionSpec" and is_cpu:
        return "on a CPU, vLLM's MLA does not look at what was loaded and answers wrongly: run this model on a GPU"
    return None


def must_load_and_save(vllm_config: Any) -> None:
    """Raises ConfigError for a `kv_role` other than both. Where steps overlap, vLLM keeps freed blocks from loads while a step
    may still write them, but only where the role says that something is loaded.
    """
    role = vllm_config.kv_transfer_config.kv_role
    if role != NEEDED_ROLE:
        raise ConfigError(
            f'kv_role is {role!r}: with Stepwell set it to "{NEEDED_ROLE}" in --kv-transfer-config, since one engine saves and '
            "loads; as anything else vLLM would not keep its own writes and our loads apart"
        )


def check_engine(vllm_config: Any) -> None:
    """Raises ConfigError for what cannot be used together, and says what to set."""
    must_load_and_save(vllm_config)
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(f"Stepwell does not support {name} {getattr(parallel, name)} yet: set it to 1")
    if vllm_config.speculative_config is not None:
        raise ConfigError("Stepwell does not support speculative decoding yet: leave speculative_config out")


def publishes_events(vllm_config: Any) -> bool:
    """Whether somebody is told of blocks that come and go (`--kv-events-config`)."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def model_identity(vllm_config: Any, identity: str | None, *, version: str, device_type: str) -> str:
    """What must agree, beside layout and tokens, before bytes may be shared. Raises ConfigError where weights have no name.

    `identity` is the operator's name for the weights, where their files do not tell.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_json_string()
    weights = identity or files_digest(Path(model.model)) or getattr(model.hf_config, "_commit_hash", None)
    if vllm_config.load_config.load_format == "dummy":
        weights = f"random {model.seed}"
    if weights is None:
        raise ConfigError(
            f'{model.model!r} has no weights here that could be told from others: set "identity" beside "store" in '
            "kv_connector_extra_config to a text that changes with them, such as the revision"
        )
    ranks, cache_dtype = vllm_config.parallel_config.tensor_parallel_size, vllm_config.cache_config.cache_dtype
    facts = [version, device_type, weights, model.dtype, model.quantization, config, ranks, cache_dtype]
    facts += [_length(model), model.quantization_config, sorted(model.model_class_overrides.items())]
    facts += [model.override_generation_config.get(ATTENTION_IN_GENERATION), vllm_config.additional_config]
    media = model.multimodal_config
    if media is not None:  # how images and the like are read
        facts += [media.mm_processor_kwargs, media.media_io_kwargs, media.video_pruning_rate, media.video_pruning_method]
    return " ".join(map(str, facts))


def _length(model: Any) -> object:
    """The longest prompt that the model was built for. Some choose rotations or scales of attention by that (LongRoPE, Llama 4),
    so that engines of other lengths compute other keys. What vLLM cuts down later to fit its memory is no part of it.
    """
    return "auto" if model.original_max_model_len == AUTO_LENGTH else model.max_model_len
