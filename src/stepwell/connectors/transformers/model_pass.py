"""A pass of a model over some tokens, on top of what its cache object holds. The one place that calls the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, __version__

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock

_CACHE_ARGUMENTS = ("past_key_values", "cache_params")
_SEED = 20
_OLDEST = 5  # version of Transformers


class ModelPass:
    """Calls a model as its own signature says. Raises ConfigError for models that take no cache, or keep state elsewhere."""

    def __init__(self, model: Any) -> None:
        if int(__version__.partition(".")[0]) < _OLDEST:
            raise ConfigError(f"a prompt cache needs Transformers {_OLDEST} or later, this is {__version__}: upgrade it")
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        takes = inspect.signature(model.forward).parameters
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError("this model has an encoder, whose input is not in the prompt: a prompt cache is for decoders")
        self.cache_argument = next((name for name in _CACHE_ARGUMENTS if name in takes), "")
        if not self.cache_argument:
            raise ConfigError(f"{type(model).__name__}.forward takes no cache ({' or '.join(_CACHE_ARGUMENTS)})")
        if any(hasattr(module, "rope_deltas") for module in model.modules()):
            raise ConfigError("this model's positions depend on images of earlier calls: a prompt cache is for text alone")
        self._keeps_logits = "logits_to_keep" in takes

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def new_past(self) -> Any:
        """An empty cache object, with the layers that this model wants."""
        return DynamicCache(config=self.model.config)

    @property
    def context_tokens(self) -> int | None:
        """The longest text for which a token's state does not depend on how much follows it; None for no limit.

        Some rotations by position change with the length of the whole text, so what was kept of a shorter one is then wrong.
        """
        parameters = getattr(self.config, "rope_parameters", None) or {}
        each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
        if not any(str(one.get("rope_type")) in ("dynamic", "longrope") for one in each):
            return None
        limits = [one.get("original_max_position_embeddings") for one in each]
        limits.append(getattr(self.config, "original_max_position_embeddings", None))
        return min((int(limit) for limit in limits if limit), default=int(self.config.max_position_embeddings))

    def text(self, tokens: int) -> torch.Tensor:
        """A prompt of the same tokens every time, from the middle of the vocabulary, where special ones are rare."""
        size = int(self.config.vocab_size)
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(size // 4, max(size // 2, size // 4 + 1), (1, tokens), generator=generator).to(self.device)

    @torch.no_grad()
    def run(self, ids_BT: torch.Tensor, past: Any = None, *, keep: int = 1) -> torch.Tensor:
        """Computes tokens on top of `past`, which then covers them too, or without any cache. The logits of the last `keep`."""
        options: dict[str, Any] = {"use_cache": past is not None}
        if past is not None:
            options[self.cache_argument] = past
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        logits_BTV: torch.Tensor = self.model(input_ids=ids_BT, **options).logits
        return logits_BTV[:, -keep:]

    def seconds_for(self, tokens: int, clock: Clock) -> float:
        """How long a pass over a prompt of this length takes, once a first one has built what it needs."""
        ids_BT, took_s = self.text(tokens), 0.0
        for _ in range(2):
            began_s = clock.now()
            self.run(ids_BT).sum().item()  # waits for the device
            took_s = clock.now() - began_s
        return took_s
