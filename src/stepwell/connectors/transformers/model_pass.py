"""Passes of a model over tokens, on top of its cache object, and the test that a model can be resumed exactly.

`check_cuts` compares the logits of a prompt computed whole with those of a prompt cut in two, beyond the longest window and the
number of tokens that sparse attention selects, and with a cache object rebuilt from pages. Not every model is exact then, even
without a prompt cache, so each is tested before use.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, __version__

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.meters import Clock
from stepwell.connectors.transformers.past_layout import PastLayout

_CACHE_ARGUMENTS = ("past_key_values", "cache_params")
_SEED = 20
_OLDEST = 5  # supported major version of Transformers


class ModelPass:
    """Calls a model by its signature. Raises ConfigError for models without a cache argument, or with state elsewhere."""

    def __init__(self, model: Any) -> None:
        if int(__version__.partition(".")[0]) < _OLDEST:
            raise ConfigError(f"a prompt cache needs Transformers {_OLDEST} or later, this is {__version__}: upgrade it")
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        takes = inspect.signature(model.forward).parameters
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(
                "this model has an encoder, whose input is not part of the prompt: a prompt cache supports decoders only"
            )
        self.cache_argument = next((name for name in _CACHE_ARGUMENTS if name in takes), "")
        if not self.cache_argument:
            raise ConfigError(f"{type(model).__name__}.forward takes no cache ({' or '.join(_CACHE_ARGUMENTS)})")
        if any(hasattr(module, "rope_deltas") for module in model.modules()):
            raise ConfigError("this model's positions depend on images of earlier calls: a prompt cache supports text only")
        self._keeps_logits = "logits_to_keep" in takes

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def new_past(self) -> Any:
        """An empty cache object with the layers of this model."""
        return DynamicCache(config=self.model.config)

    @property
    def context_tokens(self) -> int | None:
        """The longest text for which a token's state does not depend on what follows; None without a limit.

        Some rotary embeddings change with the length of the whole text, which invalidates the state of a shorter one.
        """
        parameters = getattr(self.config, "rope_parameters", None) or {}
        each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
        if not any(str(one.get("rope_type")) in ("dynamic", "longrope") for one in each):
            return None
        limits = [one.get("original_max_position_embeddings") for one in each]
        limits.append(getattr(self.config, "original_max_position_embeddings", None))
        return min((int(limit) for limit in limits if limit), default=int(self.config.max_position_embeddings))

    def text(self, tokens: int) -> torch.Tensor:
        """A reproducible random prompt, from the middle of the vocabulary, where special tokens are rare."""
        size = int(self.config.vocab_size)
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(size // 4, max(size // 2, size // 4 + 1), (1, tokens), generator=generator).to(self.device)

    @torch.no_grad()
    def run(self, ids_BT: torch.Tensor, past: Any = None, *, keep: int = 1) -> torch.Tensor:
        """Computes tokens, extending `past` if given. Returns the logits of the last `keep` tokens."""
        options: dict[str, Any] = {"use_cache": past is not None}
        if past is not None:
            options[self.cache_argument] = past
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        logits_BTV: torch.Tensor = self.model(input_ids=ids_BT, **options).logits
        return logits_BTV[:, -keep:]

    def seconds_for(self, tokens: int, clock: Clock) -> float:
        """The duration of a pass over a prompt of this length, after a warm-up pass."""
        ids_BT, took_s = self.text(tokens), 0.0
        for _ in range(2):
            began_s = clock.now()
            self.run(ids_BT).sum().item()  # synchronizes
            took_s = clock.now() - began_s
        return took_s


# Bounds of the allowed difference, as a share of the spread of the logits. Between the bounds it is TIMES the difference of the
# model's own logits for the same text when more text follows. A lost or misplaced state exceeds it.
LEAST = {torch.float64: 1e-8, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
MOST = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
TIMES = 8


def check_cuts(passes: ModelPass, layout: PastLayout) -> None:
    """Raises ConfigError for a model that is not exact when its prompt is cut. Takes a few passes over its windows."""
    page, length = layout.spec.page_tokens, _length(passes, layout)
    tail = page + 1
    cut = layout.spec.floor(length - 2 * tail)
    if cut < page:
        raise ConfigError(
            f"this model's context of {length} tokens is too short for pages of {page}: "
            f"give page_tokens={length // 8 or 1} or less"
        )
    ids_BT = passes.text(cut + 2 * tail)
    whole = passes.run(ids_BT[:, : cut + tail], keep=tail)
    allowed = _allowed(passes.model.dtype, _share(passes.run(ids_BT, keep=2 * tail)[:, :tail], whole))
    past = passes.new_past()
    for start, stop in ((0, page), (page, cut)):
        if start < stop:
            passes.run(ids_BT[:, start:stop], past)
    rebuilt = rebuilt_past(passes, layout, past, cut)
    rest_BT = ids_BT[:, cut : cut + tail]
    _compare(
        passes.run(rest_BT, past, keep=tail), whole, allowed,
        f"when a prompt of {cut + tail} tokens is cut at token {cut}. Transformers itself computes it differently then, so "
        "it cannot be resumed exactly",
    )  # fmt: skip
    again = passes.run(rest_BT, rebuilt, keep=tail)
    _compare(again, whole, allowed, f"when its cache object is rebuilt at token {cut}. It has state that was not found")


def rebuilt_past(passes: ModelPass, layout: PastLayout, past: Any, boundary: int) -> Any:
    """Rebuilds a cache object from the pages of another one."""
    prefix = layout.pack_prefix(past, range(boundary // layout.spec.page_tokens))
    rebuilt = passes.new_past()
    layout.unpack(rebuilt, boundary, {Kind.PREFIX: prefix, **layout.pack_checkpoint(past, boundary)})
    return rebuilt


def _length(passes: ModelPass, layout: PastLayout) -> int:
    """A length beyond all fixed windows, within the model's context."""
    config, page = passes.config, layout.spec.page_tokens
    looks_back = max(layout.spec.window_tokens, int(getattr(config, "index_topk", None) or 0))
    limits = (passes.context_tokens, getattr(config, "max_position_embeddings", None))
    return min([looks_back + 5 * page, *(int(limit) for limit in limits if limit)])


def _allowed(dtype: torch.dtype, rounding: float) -> float:
    least, most = (bounds.get(dtype, bounds[torch.bfloat16]) for bounds in (LEAST, MOST))
    return min(max(TIMES * rounding, least), most)


def _share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference of two sets of logits, relative to their spread."""
    difference = float((found.double() - expected.double()).square().mean().sqrt())
    return difference / max(float(expected.double().std()), 1e-30)


def _compare(found: torch.Tensor, expected: torch.Tensor, allowed: float, when: str) -> None:
    share = _share(found, expected)
    if not share <= allowed:  # also true for NaN
        raise ConfigError(
            f"this model's logits differ by {share:.1e} of their spread {when}; {allowed:.0e} is allowed. "
            "Run it without a prompt cache"
        )
