"""Small random models of transformers, prompts for them, and a prompt cache that looks at what it did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers

from engine.families import MAMBA, SMALL, reference
from engine.side_by_side import draw
from stepwell import PrefetchPolicy, StoreConfig
from stepwell.connectors.transformers import PromptCache

PAGE = 16
VOCABULARY = 128
FAMILIES = (
    "llama",
    "qwen3",
    "mistral",
    "gemma3",
    "gpt_oss",
    "falcon_h1",
    "qwen3_next",
    "kimi_linear",
    "mamba2",
    "deepseek_v3",
    "deepseek_v32",
)
HYBRIDS = ("gemma3", "falcon_h1", "qwen3_next")
WAIT = StoreConfig(
    prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0
)  # fetching is always worth it


@cache
def tiny(family: str) -> Any:
    """A model that tests only read."""
    return made(family)


def made(family: str, seed: int = 0) -> Any:
    if family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))
    elif family == "bamba":
        sizes = {name: value for name, value in MAMBA.items() if name != "mamba_d_ssm"} | {"mamba_n_heads": 8}
        config = transformers.BambaConfig(**{**SMALL, "num_hidden_layers": 2}, **sizes, attn_layer_indices=[1])
        model = transformers.BambaForCausalLM(config)
    else:
        return reference(family)
    draw(model, seed)
    return model.eval()


def prompt(seed: int, tokens: int, *, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@contextmanager
def opened(model: Any, **settings: Any) -> Iterator[PromptCache]:
    """A prompt cache with small pages, audited at the end."""
    settings = {"host_memory": "16MiB", "page_tokens": PAGE, "self_test": False, **settings}
    if "store" in settings:
        settings.setdefault("store_config", WAIT)
    with PromptCache(model, **settings) as prompts:
        yield prompts
        prompts.audit()


def logits(prompts: PromptCache, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The logits of what `prefill` leaves of a prompt, and how many tokens it had cached."""
    past, cached = prompts.prefill(ids)
    covered = prompts.covers(ids.shape[1])
    assert 0 <= cached <= covered < ids.shape[1]
    return prompts._passes.run(ids[:, covered:], past if covered else None, keep=ids.shape[1] - covered), cached


def uncached(model: Any, ids: torch.Tensor, last: int) -> torch.Tensor:
    """The logits of the last tokens, by the model alone."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[:, -last:]
    return found


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **options)
    return found
