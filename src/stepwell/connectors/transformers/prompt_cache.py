"""A prompt cache for a Transformers model: prompts resume from host memory or a store, and only the rest is computed.

    cache = PromptCache(model, host_memory="8GiB", store="log:/var/cache/stepwell")
    past, cached = cache.prefill(input_ids)        a cache object for the model, and how many tokens were not computed
    tokens = cache.generate(input_ids, ...)        the same, and on with the model's own generate()

The model keeps its own device memory; the cache below has a host tier and no device tier. Calls may come from any thread, one
after the other. A cache object that is returned never covers a whole prompt: at least one token is left to compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any
from weakref import ref

import torch

from stepwell.base.config import CacheConfig, PlacementConfig, StoreConfig
from stepwell.base.errors import BadTokens, ConfigError
from stepwell.base.ids import Tier
from stepwell.base.meters import SystemClock
from stepwell.base.prompt import Namespace
from stepwell.base.spec import ModelSpec
from stepwell.base.units import is_none, parse_tier
from stepwell.cache.build import build_cache, layouts_for
from stepwell.cache.explain import Explanation
from stepwell.cache.facade import Cache
from stepwell.cache.report import Stats
from stepwell.connectors.transformers.identity import Identity
from stepwell.connectors.transformers.model_pass import ModelPass, check_cuts
from stepwell.connectors.transformers.past_layout import PastLayout, tensors_of
from stepwell.connectors.transformers.prefill import CHUNK_TOKENS, Batch, Prefill, Prefilled, StagedCopyEngine
from stepwell.jobs.executors import InlineCopyExecutor
from stepwell.store.api import Store
from stepwell.store.registry import open_store
from stepwell.transfer.copy_engine import must_fit
from stepwell.transfer.first_calls import make_first_calls
from stepwell.transfer.torch_memory import TorchMemory

TIMED_TOKENS = 256  # of the pass that measures prefill speed, which decides whether to wait for the store
PROBE_TOKENS = 5  # of the pass that fills the cache object whose tensors are inspected
STEP_S = 0.05  # between steps of the cache while it is idle, so that backups progress


class PromptCache:
    """Cached prompts of one model. Raises ConfigError for unsupported models or settings, and says what to change.

    `store` is a store, or its name as in `log:DIR` with `store_options`; the cache closes a store that it opened. `identity` is a
    digest of the weights, to avoid reading them all. The model is tested before the first prompt (`model_pass.check_cuts`);
    `self_test=False` skips that for a model that has passed.
    """

    def __init__(
        self, model: Any, *, host_memory: str | int, store: str | Store | None = None,
        store_options: Mapping[str, str] | None = None, store_config: StoreConfig | None = None,
        placement: PlacementConfig | None = None, page_tokens: int = 64, chunk_tokens: int = CHUNK_TOKENS,
        identity: str | None = None, self_test: bool = True,
    ) -> None:  # fmt: skip
        if chunk_tokens < page_tokens:
            raise ConfigError(f"chunk_tokens must be at least the {page_tokens} of a page, got {chunk_tokens}")
        if isinstance(store, str) and is_none(store):
            store = None
        if store is None and store_options:
            raise ConfigError('store_options need a store, for example store="log:/var/cache/prompts"')
        make_first_calls()
        self.model = model
        _must_be_evaluating(model)
        self._passes = ModelPass(model)
        self._identity = Identity(model, identity)
        self._layout = PastLayout(self._probe(), name=f"{model.config.model_type} in transformers", page_tokens=page_tokens)
        self._tested, self._timed = not self_test, store is None
        self._lock, self._closed = Lock(), Event()
        self._stepper: Thread | None = None
        self._cache, copies = self._build(_size(host_memory), placement or PlacementConfig())
        self._prefill = Prefill(self._cache, self._passes, self._layout, copies, chunk_tokens=chunk_tokens)
        self._store: Store | None = None
        if store is not None:
            self._attach(store, store_options, store_config or StoreConfig())
        self._cache.hand_over()
        if store is not None:
            self._stepper = Thread(target=_keep_stepping, args=(ref(self), self._closed), name="stepwell-steps", daemon=True)
            self._stepper.start()

    def _build(self, host_bytes: int, placement: PlacementConfig) -> tuple[Cache, StagedCopyEngine]:
        spec = self._layout.spec
        embedded = self.model.get_input_embeddings().weight.shape[0]
        config = CacheConfig(device_bytes=None, host_bytes=host_bytes, placement=placement, vocab_size=embedded)
        must_fit(host_bytes, settings="host_memory")
        memory = TorchMemory(spec, layouts_for(spec, config)[Tier.HOST])
        copies = StagedCopyEngine(memory)
        executor = InlineCopyExecutor([copies])
        return build_cache(spec, config, executor=executor, model=self._identity.name, host_pages=[memory]), copies

    def _attach(self, store: str | Store, options: Mapping[str, str] | None, config: StoreConfig) -> None:
        opened = open_store(store, options=options) if isinstance(store, str) else store
        try:
            self._cache.store.attach(opened, config)
        except BaseException:
            if isinstance(store, str):
                opened.close()
            raise
        self._store = opened if isinstance(store, str) else None

    # ---- questions ----------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """What the model remembers, as its own cache object says."""
        return self._layout.spec

    def covers(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt of that length `prefill` covers: whole pages, and never all tokens."""
        return self.spec.usable(prompt_tokens)

    def explain(self, input_ids: torch.Tensor, *, salt: str | None = None) -> Explanation:
        """Explains where a prompt would resume, and why not later. Changes nothing. Raises BadTokens."""
        prompts = self._checked(input_ids, None)
        if len(prompts) > 1:
            raise BadTokens(f"explain takes one prompt at a time, got {len(prompts)}: pass input_ids[row : row + 1]")
        with self._turn():
            return self._cache.explain(prompts[0], namespace=self._namespace(salt))

    def stats(self) -> Stats:
        """Usage of the host tier, operations in flight, and all counters."""
        with self._turn():
            return self._cache.stats()

    def audit(self) -> None:
        """Asserts every invariant of the cache. Slow: for tests and debugging."""
        with self._turn():
            self._cache.audit()

    # ---- prompts ------------------------------------------------------------------------------------

    def prefill(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, salt: str | None = None
    ) -> Prefilled:  # fmt: skip
        """Makes a cache object that covers whole pages of all prompts, from cached pages and by computing the rest.

        `input_ids` are prompts of one length, `[batch, tokens]`, without padding. They resume where all of them can. Only prompts
        with the same `salt` share cached pages. Raises BadTokens and ConfigError.
        """
        prompts = self._checked(input_ids, attention_mask)
        with self._turn():
            self._follow_model()
            return self._prefill.run(prompts, input_ids.to(self._passes.device), self._namespace(salt))

    def generate(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, salt: str | None = None, **options: Any
    ) -> Any:  # fmt: skip
        """Runs `prefill`, then the model's own `generate` with its `options`. Answers are not cached.

        Raises BadTokens, and ConfigError for options that do not work with a resumed prompt.
        """
        check_options(options)
        if self._passes.cache_argument != "past_key_values":
            raise ConfigError(
                f"generate() of {type(self.model).__name__} computes the whole prompt even with a cache: use prefill(), "
                f"then model(input_ids[:, covers:], {self._passes.cache_argument}=past)"
            )
        past, _ = self.prefill(input_ids, attention_mask=attention_mask, salt=salt)
        times = answers_per_prompt(self.model, options)
        if times > 1:
            once, past = past, self._passes.new_past()
            self._layout.repeat(once, past, times, tokens=self.covers(input_ids.shape[1]))
        mask = torch.ones_like(input_ids)  # else tokens that look like padding would be left out
        return self.model.generate(input_ids, attention_mask=mask, past_key_values=past, **options)

    # ---- the end ------------------------------------------------------------------------------------

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Waits for backups and closes the store. False if backups are incomplete. Idempotent."""
        if self._closed.is_set():
            return True
        self._closed.set()
        if self._stepper is not None:
            self._stepper.join()
        with self._lock:
            try:
                return self._cache.close(timeout_s=timeout_s)
            finally:
                if self._store is not None:
                    self._store.close()

    def __enter__(self) -> PromptCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Gives the calling thread exclusive use of the cache."""
        with self._lock:
            if self._closed.is_set():
                raise ConfigError("this prompt cache is closed: create a new one")
            try:
                yield
            finally:
                self._cache.hand_over()

    def step(self) -> None:
        """Advances backups. With a store, a thread calls this."""
        with self._lock:
            if not self._closed.is_set():
                self._cache.step()
                self._cache.hand_over()

    def _namespace(self, salt: str | None) -> Namespace:
        return replace(self._cache.namespace, model=self._identity.name, salt=salt)

    def _probe(self) -> Any:
        past = self._passes.new_past()
        self._passes.run(self._passes.text(PROBE_TOKENS), past)
        return tensors_of(past)

    def _follow_model(self) -> None:
        """Before a prefill: tests and times the model once, and renames a model whose weights have changed."""
        _must_be_evaluating(self.model)
        if self._identity.changed() and self._probe() != self._layout.tensors:
            raise ConfigError(
                "the model was moved, cast or changed in shape since this prompt cache was created: create a new one"
            )
        if not self._tested:
            check_cuts(self._passes, self._layout)
            self._tested = True
        if not self._timed:
            tokens = min(TIMED_TOKENS, self._passes.context_tokens or TIMED_TOKENS)
            self._cache.computed([(0, tokens)], self._passes.seconds_for(tokens, SystemClock()))
            self._timed = True

    def _checked(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Batch:
        if not isinstance(input_ids, torch.Tensor):
            raise BadTokens(f"input_ids must be a tensor, [batch, tokens], got a {type(input_ids).__name__}")
        if input_ids.ndim != 2 or not input_ids.numel():
            raise BadTokens(f"input_ids must be [batch, tokens] with at least one token, got shape {list(input_ids.shape)}")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise BadTokens("attention_mask masks tokens: pass prompts of one length without padding, or one at a time")
        limit = self._passes.context_tokens
        if limit is not None and input_ids.shape[1] > limit:
            raise BadTokens(
                f"a prompt of {input_ids.shape[1]} tokens: beyond {limit} this model's positions depend on the length of the "
                "whole text, so it cannot be resumed; run it without a prompt cache"
            )
        rows: Batch = input_ids.tolist()
        return rows


def _size(host_memory: str | int) -> int:
    size = parse_tier(host_memory, "host_memory")
    if size is None:
        raise ConfigError('host_memory must be more than 0, because prompts are cached there: use a size such as "8GiB"')
    return size


def _must_be_evaluating(model: Any) -> None:
    if model.training:
        raise ConfigError("the model is in training mode, in which layers may be random: call model.eval() first")


def _keep_stepping(cache: ref[PromptCache], closed: Event) -> None:
    """Advances backups between calls, for as long as the prompt cache exists."""
    while not closed.wait(STEP_S):
        owner = cache()
        if owner is None:
            return
        owner.step()
        del owner


_OURS = ("past_key_values", "cache_params", "cache_implementation", "inputs")
_UNTRIED = ("assistant_model", "assistant_tokenizer", "prompt_lookup_num_tokens", "custom_generate", "synced_gpus")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that do not work with a resumed prompt."""
    for name, value in options.items():
        if value is None:
            continue
        if name in _OURS:
            raise ConfigError(f"generate() of a prompt cache does not take {name}: it creates the cache object from input_ids")
        if name in _UNTRIED:
            raise ConfigError(f"{name} is untested with a prompt cache: leave it out, or call the model's own generate()")
        if name == "use_cache" and not value:
            raise ConfigError("use_cache=False leaves nothing to resume: call the model's own generate()")
        if isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{name} would be part of the prompt, but cached prompts are identified by their tokens only: "
                "call the model's own generate()"
            )


def answers_per_prompt(model: Any, options: Mapping[str, Any]) -> int:
    """The number of rows that `generate` makes from each prompt."""
    config = options.get("generation_config") or model.generation_config
    counts = [options.get(name) or getattr(config, name, None) or 1 for name in ("num_beams", "num_return_sequences")]
    return int(max(counts))
