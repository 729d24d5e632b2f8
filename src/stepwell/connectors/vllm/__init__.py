"""Stepwell below vLLM: `StepwellConnector` is what `--kv-transfer-config` names. For those who keep vLLM's own offloading,
`StepwellOffloadingConnector` and `StepwellTier` put the verified store beneath its host tier.

    connector.py         the adapter: vLLM's interface, in vLLM's words
    step_metadata.py     what vLLM carries between processes for us
    block_events.py      what is stored and evicted as vLLM's KV events, under vLLM's names (page_names.py)
    metrics.py           what is counted, through vLLM's statistics and its Prometheus endpoint
    assembly.py          the scheduler's side put together from vLLM's configuration
    scheduler_side.py    one cache, beside vLLM's scheduler: looks prompts up, orders copies, commits what is computed
    commits.py           what a step computes, offered to the cache
    requests.py          vLLM's requests as that side sees them; which of them are not cached, and why
    request_tokens.py    their tokens, with media told apart by content and position
    weights.py           which weights a worker holds now, as a digest
    doubts.py            whether they are known: asked after a reset, answered by every rank
    worker_side.py       copies between vLLM's blocks and host memory, on every rank; decides nothing
    orders.py            what travels between the two
    groups.py            vLLM's KV cache groups as states of a model, and its block tables as names of pages
    engine_config.py     what vLLM's configuration says, and what is refused
    settings.py

    secondary_tier.py    the adapter to vLLM's own offloading
    offloaded_chunks.py  what vLLM's chunks are called in a store, and whose bytes they are
    chunk_store.py       chunks looked up, loaded and stored in the background

The first four and `secondary_tier.py` import vLLM, when one of the three names is asked for, so that the rest can be used and
tested without it.
"""

from __future__ import annotations

from importlib import import_module

_MODULES = {
    "StepwellConnector": "connector", "StepwellOffloadingConnector": "secondary_tier", "StepwellTier": "secondary_tier",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _MODULES:
        try:
            return getattr(import_module(f"stepwell.connectors.vllm.{_MODULES[name]}"), name)
        except ImportError as error:
            raise ImportError(f"{error}. Stepwell's connector is written for vLLM 0.32: install that one") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
