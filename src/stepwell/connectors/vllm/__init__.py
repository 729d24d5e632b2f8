"""Stepwell below vLLM: `StepwellConnector` is what `--kv-transfer-config` names.

    connector.py         the adapter: vLLM's interface, in vLLM's words
    step_metadata.py     what vLLM carries between processes for us
    block_events.py      what is stored and evicted as vLLM's KV events, under vLLM's names (page_names.py)
    metrics.py           what is counted, through vLLM's statistics and its Prometheus endpoint
    assembly.py          the scheduler's side put together from vLLM's configuration
    scheduler_side.py    one cache, beside vLLM's scheduler: looks prompts up, orders copies, commits what is computed
    commits.py           what a step computes, offered to the cache
    requests.py          vLLM's requests as that side sees them
    worker_side.py       copies between vLLM's blocks and host memory, on every rank; decides nothing
    orders.py            what travels between the two
    groups.py            vLLM's KV cache groups as states of a model, and its block tables as names of pages
    engine_config.py     what vLLM's configuration says, and what is refused
    settings.py

The first four import vLLM, when `StepwellConnector` is asked for, so that the rest can be used and tested without it.
"""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    if name == "StepwellConnector":
        return import_module("stepwell.connectors.vllm.connector").StepwellConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
