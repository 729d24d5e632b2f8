"""The first token of a long prompt on a decode server: computed by itself, handed over by a prefill server when that is done, and
with parts sent ahead while it computes.

    computed       [============ decode computes ============]*
    handed over    [============ prefill computes ===========][ fetch ][ decode ]*
    sent ahead     [============ prefill computes ===========][f][ decode ]*             * first token
                        [ fetch ]  [ fetch ]  [ fetch ]

Two prefill servers, of which one knows the decode server and so sends ahead. Each way gets a prompt of its own that nobody has
seen, in turns, in the same run. A server that only waits takes no processor from the others.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from stepwell.cli.demo.server import Server, fetch, serving

MEMORY = ("--device-memory", "768MiB", "--host-memory", "768MiB")
# Parts can be sent up to where the rest can be resumed from: so a checkpoint as often as a part is long, and passes of a quarter.
PARTS = ("--checkpoint-interval", "1024", "--chunk-tokens", "256")
TOKEN = ("--peer-token", "a-token-for-all-of-them")
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
WARM_UP_TOKENS = 2048  # opens the lanes
WIDE_ROWS = "wide-rows"  # random weights that compute little and leave 64 KiB of rows a token, nearly half of what an 8B does


def run(*, model: str, tokens: int, rounds: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="bench-cluster-") as directory:
        logs = Path(directory)
        weights = _wide_rows(logs / WIDE_ROWS) if model == WIDE_ROWS else model
        common = ["--model", str(weights), "--served-model-name", "bench", *MEMORY, *PARTS, *TOKEN]
        here = _free_port()
        sends = ["--role", "prefill", "--peer", f"127.0.0.1:{here}"]
        with (
            serving([*common, "--role", "prefill"], logs / "prefill.log") as plain,
            serving([*common, *sends], logs / "sends.log") as ahead,
        ):
            peers = [each for server in (plain, ahead) for each in ("--peer", server.address.removeprefix("http://"))]
            decode = ["--role", "decode", *peers, "--prefetch-policy", "wait_complete", "--port", str(here)]
            with serving([*common, *decode], logs / "decode.log") as server:
                _measure(plain, ahead, server, WARM_UP_TOKENS)
                rows = [_measure(plain, ahead, server, tokens) for _ in range(rounds)]
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratios = {
        "decode s, of computed: handed over": ("handed over: decode s", "computed: first token s"),
        "decode s, of computed: sent ahead": ("sent ahead: decode s", "computed: first token s"),
        "decode s, sent ahead of handed over": ("sent ahead: decode s", "handed over: decode s"),
        "first token, sent ahead of handed over": ("sent ahead: first token s", "handed over: first token s"),
    }
    shares = {name: statistics.median(row[above] / row[below] for row in rows) for name, (above, below) in ratios.items()}
    return {"model": model, "tokens": tokens, "rounds": rounds, **found, **shares}


def _measure(plain: Server, ahead: Server, decode: Server, tokens: int) -> dict[str, float]:
    """One prompt each way; what is answered is compared with what the decode server computes."""
    found: dict[str, float] = {}
    prompt = _prompt(tokens)
    found["computed: first token s"], _ = _timed(decode, prompt, cache_salt="computed here")
    for way, prefill in (("handed over", plain), ("sent ahead", ahead)):
        prompt = _prompt(tokens)
        prefill_s, done = _timed(prefill, prompt, kv_transfer_params=ASKED)
        decode_s, answer = _timed(decode, prompt, kv_transfer_params=done["kv_transfer_params"])
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > 0.8 * tokens, f"not handed over: {details}"
        _, computed = _timed(prefill, prompt, cache_salt="computed here")
        assert answer["choices"][0]["text"] == computed["choices"][0]["text"], "another first token"
        found |= {
            f"{way}: prefill s": prefill_s,
            f"{way}: decode s": decode_s,
            f"{way}: first token s": prefill_s + decode_s,
            f"{way}: tokens that came with the request": details["store_tokens"],
            f"{way}: tokens that were there": details["cached_tokens"] - details["store_tokens"],
        }
    return found


def _wide_rows(folder: Path) -> Path:
    """A Llama of four layers with long rows and short everything else."""
    hidden, heads, width, vocab = 128, 8, 256, 256
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 4, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 65536, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    generator, rows = torch.Generator().manual_seed(1), heads * width
    matrices = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(4):
        inside = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (rows, hidden))
        inside |= {"self_attn.o_proj": (hidden, rows)}
        inside |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), (hidden, hidden))
        matrices |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in matrices.items()}
    norms = ["model.norm"]
    norms += [f"model.layers.{layer}.{name}" for layer in range(4) for name in ("input_layernorm", "post_attention_layernorm")]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _prompt(tokens: int) -> list[int]:
    random = Random()
    return [random.randrange(1, 200) for _ in range(tokens)]


def _timed(server: Server, prompt: list[int], **more: Any) -> tuple[float, dict[str, Any]]:
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    started = time.perf_counter()
    answer = fetch(f"{server.address}/v1/completions", body)
    return time.perf_counter() - started, answer


def _free_port() -> int:
    """For a server that another must know before it starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
