"""Whether a model gives the same logits when a prompt is cut in two: what resuming from a cache depends on.

Not every model does, with no cache of ours involved. So each is tried before it is used, beyond its longest window and the number
of tokens that its sparse attention selects, and also with its cache object made anew from pages.
"""

from __future__ import annotations

from typing import Any

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.connectors.transformers.model_pass import ModelPass
from stepwell.connectors.transformers.past_layout import PastLayout

# How much of the spread of logits rounding may make up: at least, and at most. Between them it is what the model's own logits of
# the same text differ by, a few times over, when more text follows. A state that is lost or misplaced makes up more.
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
            f"this model's context of {length} tokens has no room for pages of {page}: "
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
        "nothing of it can be resumed exactly",
    )  # fmt: skip
    again = passes.run(rest_BT, rebuilt, keep=tail)
    _compare(again, whole, allowed, f"when its cache object is made anew at token {cut}. It keeps something that was not found")


def rebuilt_past(passes: ModelPass, layout: PastLayout, past: Any, boundary: int) -> Any:
    """A new cache object with what the pages of another one hold."""
    prefix = layout.pack_prefix(past, range(boundary // layout.spec.page_tokens))
    rebuilt = passes.new_past()
    layout.unpack(rebuilt, boundary, {Kind.PREFIX: prefix, **layout.pack_checkpoint(past, boundary)})
    return rebuilt


def _length(passes: ModelPass, layout: PastLayout) -> int:
    """Beyond everything that a token looks back to by a fixed number of tokens, as far as the model's context allows."""
    config, page = passes.config, layout.spec.page_tokens
    looks_back = max(layout.spec.window_tokens, int(getattr(config, "index_topk", None) or 0))
    limits = (passes.context_tokens, getattr(config, "max_position_embeddings", None))
    return min([looks_back + 5 * page, *(int(limit) for limit in limits if limit)])


def _allowed(dtype: torch.dtype, rounding: float) -> float:
    least, most = (bounds.get(dtype, bounds[torch.bfloat16]) for bounds in (LEAST, MOST))
    return min(max(TIMES * rounding, least), most)


def _share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How much two sets of logits differ, beside how much they vary."""
    difference = float((found.double() - expected.double()).square().mean().sqrt())
    return difference / max(float(expected.double().std()), 1e-30)


def _compare(found: torch.Tensor, expected: torch.Tensor, allowed: float, when: str) -> None:
    share = _share(found, expected)
    if not share <= allowed:  # not a number either
        raise ConfigError(
            f"this model's logits differ by {share:.1e} of their spread {when}; {allowed:.0e} is allowed. "
            "Run it without a prompt cache"
        )
