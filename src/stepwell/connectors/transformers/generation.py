"""What may be asked of `generate` beside a prompt cache. Reads settings; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stepwell.base.errors import ConfigError

_OURS = ("past_key_values", "cache_params", "cache_implementation", "inputs")
_UNTRIED = ("assistant_model", "assistant_tokenizer", "prompt_lookup_num_tokens", "custom_generate", "synced_gpus")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that a resumed prompt does not go with."""
    for name, value in options.items():
        if value is None:
            continue
        if name in _OURS:
            raise ConfigError(f"generate() of a prompt cache takes no {name}: it makes the cache object from input_ids itself")
        if name in _UNTRIED:
            raise ConfigError(f"{name} was never tried with a prompt cache: leave it out, or call the model's own generate()")
        if name == "use_cache" and not value:
            raise ConfigError("use_cache=False leaves nothing to resume: call the model's own generate()")
        if isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{name} would be part of the prompt, but cached prompts are told apart by their tokens alone: "
                "call the model's own generate()"
            )


def answers_per_prompt(model: Any, options: Mapping[str, Any]) -> int:
    """How many rows `generate` makes of each prompt."""
    config = options.get("generation_config") or model.generation_config
    counts = [options.get(name) or getattr(config, name, None) or 1 for name in ("num_beams", "num_return_sequences")]
    return int(max(counts))
