"""Stepwell below vLLM: `StepwellConnector` is what `--kv-transfer-config` names. To keep vLLM's own offloading, use
`StepwellOffloadingConnector` and `StepwellTier`, which put the verified store below its host tier.

    connector.py         the adapter: vLLM's interface, in vLLM's words, and the metadata vLLM carries between processes
    block_events.py      pages stored and evicted, as vLLM's KV events under vLLM's block hashes
    metrics.py           counters, through vLLM's statistics and its Prometheus endpoint
    engine_config.py     what vLLM's configuration says, what is refused, and the scheduler's side built from it
    scheduler_side.py    one cache next to vLLM's scheduler: looks prompts up, orders copies, commits what is computed
    requests.py          vLLM's requests as that side sees them: namespaces, tokens (media identified by content), block hashes
    weights.py           which weights a worker holds now, as a digest, and whether they are known after a reset
    worker_side.py       copies between vLLM's blocks and host memory, on every rank; decides nothing
    orders.py            the copies that travel between the two, and their outcomes
    groups.py            vLLM's KV cache groups as states of a model, and its block tables as names of pages
    settings.py          what an operator sets

    secondary_tier.py    the adapter to vLLM's own offloading
    offloaded_chunks.py  names of vLLM's chunks in a store, and whose bytes they are
    chunk_store.py       chunks looked up, loaded and stored in the background

`connector.py`, `block_events.py`, `metrics.py` and `secondary_tier.py` import vLLM, and only when one of the three names is used,
so that the rest can be used and tested without vLLM.
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
