"""A real server around a real, very small engine: Gemma-shaped, random weights, one token per byte, answers in ASCII."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import openai
import torch

from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine.building.build import build_engine
from stepwell.engine.building.settings import EngineConfig
from stepwell.engine.engine import Engine
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE, byte_tokenizer
from stepwell.engine.loading.weights import HeldTensors
from stepwell.server.access.tenants import Principals, Secrets, Tenant
from stepwell.server.running import ModelServer, address_of, bind
from waiting import PATIENCE_S, wait_until

T = TypeVar("T")
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0)  # however busy the machine is
NAME, KEY, ADMIN = "tiny", "a key", "an admin token"
PAGE, CONTEXT, MAX_BODY = 16, 2048, 1 << 20
HIDDEN, INNER, HEADS, HEAD_DIM, VOCAB = 32, 48, 2, 16, 260
CONFIG: dict[str, object] = {
    "model_type": "gemma3_text", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM,
    "vocab_size": VOCAB, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": False,
}  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in norms}
    generator = torch.Generator().manual_seed(5)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made = {name: noise / noise.shape[-1] ** 0.5 if noise.ndim > 1 else noise * 0.1 for name, noise in made.items()}
    head = torch.zeros(VOCAB, HIDDEN)
    head[32:127] = torch.randn(95, HIDDEN, generator=generator) * 0.6  # printable bytes; the others have a logit of 0
    return made | {"lm_head.weight": head}


def tiny_checkpoint() -> Checkpoint:
    text = byte_tokenizer()
    return Checkpoint(
        name=NAME,
        config=CONFIG,
        source=HeldTensors(tensors()),
        text=text,
        digest="tiny",
        eos_ids=text.eos_ids,
        defaults={},
        chat=ChatTemplate(CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
    )


def tiny_draft() -> Checkpoint:
    """The same weights looking at everything, which drafts have to."""
    made = tiny_checkpoint()
    return replace(made, config=CONFIG | {"layer_types": ["full_attention"] * 2}, digest="tiny draft")


class Running:
    """A server on a thread of its own, and what tests ask of it."""

    def __init__(self, server: ModelServer, engine: Engine, address: str) -> None:
        self.server, self.engine, self.address = server, engine, address

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    def settle(self, until: Callable[[Engine], bool]) -> None:
        """Waits until something is true on the engine's thread."""
        wait_until(lambda: self.on_engine(until), pause_s=0.005)

    def on_engine(self, call: Callable[[Engine], T]) -> T:
        """What a function says of the engine, on the engine's thread."""
        return self.server.served.loop.call(call).result(PATIENCE_S)

    @property
    def inside(self) -> int:
        """Requests that have come to the admission and are not answered yet."""
        return self.server._server._admission.num_inside

    def audit(self) -> None:
        self.settle(lambda engine: engine.num_open == 0)
        self.on_engine(lambda engine: engine.cache.audit())


class Held:
    """Keeps an engine from computing until it is released; everything else about it goes on."""

    def __init__(self, served: Running) -> None:
        self._scheduler, self._plan = served.engine.scheduler, served.engine.scheduler.plan

    def __enter__(self) -> Held:
        self._scheduler.plan = lambda: []  # type: ignore[method-assign]
        return self

    def let_go(self) -> None:
        self._scheduler.plan = self._plan  # type: ignore[method-assign]

    def __exit__(self, *exception: object) -> None:
        self.let_go()


@contextmanager
def running(
    *,
    api_key: str | None = None,
    hosts: tuple[str, ...] = (),
    draft: Checkpoint | None = None,
    checkpoint: Checkpoint | None = None,
    tenants: Sequence[Tenant] = (),
    max_priority: int = 0,
    serving: Mapping[str, Any] | None = None,
    **settings: object,
) -> Iterator[Running]:
    """`settings` are the engine's, `serving` those of the server."""
    checkpoint = checkpoint or tiny_checkpoint()
    principals = Principals(Secrets(api_key=api_key, admin_token=ADMIN), tenants, max_priority=max_priority)
    defaults: dict[str, object] = {"memory_quotas": principals.memory_quotas}
    defaults |= {"device": "cpu", "device_memory": "8MiB", "host_memory": "8MiB", "page_tokens": PAGE, "store_config": WAIT}
    config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
    engine = build_engine(checkpoint, config, draft=draft)
    server = ModelServer(
        engine,
        name=NAME,
        chat=checkpoint.chat,
        principals=principals,
        hosts=hosts,
        store=config.store,
        store_config=config.store_config,
        **{"max_body_bytes": MAX_BODY, **(serving or {})},
    )
    taken = bind("127.0.0.1", 0)
    address = address_of(taken)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(taken, ready.set), name="server")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "the server did not start"
        made = Running(server, engine, address)
        yield made
        made.audit()
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"
