"""Servers with a role and others, as a client sees them that does what vLLM's proxies do."""

from __future__ import annotations

from typing import Any

import httpx

from waiting import PATIENCE_S

TOKEN = "a-token-for-both-of-them"
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None, "remote_port": None}
ARGUMENTS = [
    "--model", "random-hybrid", "--served-model-name", "demo", "--device", "cpu", "--device-memory", "32MiB",
    "--host-memory", "32MiB", "--peer-token", TOKEN,
]  # fmt: skip


def client(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=PATIENCE_S, trust_env=False)


def complete(server: httpx.Client, prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def hand_over(server: httpx.Client, prompt: str) -> dict[str, Any]:
    """Has a prompt computed; returns the parameters for the decode server."""
    params = complete(server, prompt, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    return dict(params)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def stored(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["store_tokens"])


def prompt_of(what: str) -> str:
    return f"What has been known about {what} before anybody decides anything at all? " * 6
