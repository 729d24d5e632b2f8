"""vLLM's requests as the scheduler's side sees them: whose they are, their tokens, what a step computes. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from stepwell.base.meters import Counters
from stepwell.base.prompt import Namespace
from stepwell.cache.explain import Cause
from stepwell.connectors.vllm.commits import Computing
from stepwell.connectors.vllm.request_tokens import RequestTokens, media_refusal
from stepwell.connectors.vllm.scheduler_side import Seen
from stepwell.connectors.weight_files import Adapters

EXPLAIN, STORE = "stepwell_explain", "stepwell_store"  # what a request may ask for in its kv_transfer_params


class NotCached(Enum):
    """Why nothing of a request is cached: counted, and told to a request that asks."""

    EMBEDDINGS = "it has prompt embeddings, which its tokens do not tell"
    MEDIA = "its media cannot be told apart"
    POOLING = "it is a pooling request"
    RESUMABLE = "its input is streamed: tokens are exchanged while it runs, and later ones may bring media"
    ADAPTER = "its adapter cannot be read, or its files have changed since it was loaded"


class Requests:
    """Those that the engine has. One thread, the scheduler's."""

    def __init__(
        self, base: Namespace, *, explains: bool, page_tokens: int, vocab_size: int, counters: Counters
    ) -> None:  # fmt: skip
        """`base` is the namespace of requests without an adapter and a salt; `explains`: they may ask why."""
        self._base = base
        self._explains = explains
        self._page_tokens, self._vocab_size = page_tokens, vocab_size
        self._counters = counters
        self._adapters = Adapters()
        self._open: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._open.values())

    def add(self, request: Any) -> Seen:
        self._open[request.request_id] = request
        asked = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        namespace, why_not = self._namespace(request)
        return Seen(
            tokens=RequestTokens(request, page_tokens=self._page_tokens, vocab_size=self._vocab_size),
            namespace=namespace,
            why_not=why_not,
            may_read=not request.skip_reading_prefix_cache,
            asks_why=asked.get(EXPLAIN) is True and self._explains,
            asks_in_vain=asked.get(EXPLAIN) is True and not self._explains,
            may_store=asked.get(STORE) is not False,
        )

    def remove(self, request: Any) -> None:
        self._open.pop(request.request_id, None)

    def rename_model(self, model: str) -> bool:
        """Requests from now on are of this model. True if its name is another one than before."""
        is_other = self._base.model != model
        self._base = replace(self._base, model=model)
        return is_other

    def _namespace(self, request: Any) -> tuple[Namespace | None, str | None]:
        """Who may share what is cached of a request; None, with the reason, where nothing of it may be cached."""
        lora, adapter = request.lora_request, None
        if request.prompt_embeds is not None:
            return None, self._refused(NotCached.EMBEDDINGS)
        if request.pooling_params is not None:
            return None, self._refused(NotCached.POOLING)
        if request.resumable:
            return None, self._refused(NotCached.RESUMABLE)
        if request.mm_features:
            why = media_refusal(request, page_tokens=self._page_tokens, vocab_size=self._vocab_size)
            if why is not None:
                return None, self._refused(NotCached.MEDIA, why)
        if lora is not None:
            digest = self._adapters.digest(lora.lora_int_id, lora.lora_path)
            if digest is None:
                return None, self._refused(NotCached.ADAPTER)
            adapter = f"{lora.lora_name} {digest}"
        return replace(self._base, adapter=adapter, salt=request.cache_salt), None

    def _refused(self, cause: NotCached, more: str | None = None) -> str:
        self._counters.add(f"not_cached_{cause.name.lower()}")
        return f"{cause.value}: {more}" if more is not None else cause.value

    def computing(self, num_scheduled_tokens: Mapping[str, int], state: Any) -> list[tuple[Any, Computing]]:
        """What a step computes, request by request. `state` is vLLM's block state, which holds during that call alone."""
        return [
            (self._open[name], _computing(self._open[name], tokens, state))
            for name, tokens in num_scheduled_tokens.items()
            if name in self._open
        ]


def told(seen: Seen | None) -> dict[str, object] | None:
    """What goes back with the answer of a request that asked why it resumed where it did; None for others.

    Nobody is told what is stored for other adapters.
    """
    if seen is not None and seen.asks_in_vain:
        says = 'explanations are off here: the operator turns them on with "explain": true in kv_connector_extra_config'
        return {"stepwell": {"says": says}}
    if seen is None or not seen.asks_why:
        return None
    why = seen.explanation
    if why is not None and why.cause is Cause.OTHER_NAMESPACE:
        why = replace(why, cause=Cause.NEVER_STORED)
    if why is None:
        cause = seen.why_not or "it has tokens that the vocabulary lacks, or ended early"
        return {"stepwell": {"says": f"computed without the cache: {cause}"}}
    return {
        "stepwell": {
            "says": str(why), "cause": why.cause.name.lower(), "prompt_tokens": why.prompt_tokens,
            "known_tokens": why.known_tokens, "restore_tokens": why.restore_tokens, "store_tokens": why.store_tokens,
            "states": list(why.states), "tier": why.tier.label if why.tier is not None else None,
        }
    }  # fmt: skip


def _computing(request: Any, tokens: int, state: Any) -> Computing:
    name, computed = request.request_id, request.num_computed_tokens
    offered = {(group, boundary): block for group, block, boundary in state.boundary_state_offloads.get(name, ())}
    return Computing(
        request=name, computed=computed, upto=computed + tokens, known=request.num_tokens,
        table=lambda: state.get_block_ids(name), offered=offered,
    )  # fmt: skip
