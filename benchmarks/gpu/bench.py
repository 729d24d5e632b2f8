"""What all parts share: the device, full or tiny sizes, fresh prompts, engines, and limited time."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from engine.models import held
from gpu.shapes import Made, make
from report import Row
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families import from_config
from stepwell.engine import Engine, EngineConfig, Limits, build_engine
from stepwell.engine.loading.tokenizer import Tokenizer

TINY_DIVISOR = 128  # of every length
TINY_PAGE, TINY_BATCH, TINY_STEPS, TINY_CHUNK = 16, 8, 4, 256
CHUNK_TOKENS = 8192
LEAST_TIER_BYTES = 8 << 20


class Budget:
    """Time of one part. Work that is slow only once, such as compiling kernels, does not count."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._since_s = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._left_s - (time.monotonic() - self._since_s)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s += time.monotonic() - began_s


@dataclass(slots=True, kw_only=True)
class Bench:
    device: str
    tiny: bool
    directory: Path
    console: Console
    budget: Budget = field(default_factory=lambda: Budget(0))
    _seed: int = 0

    def say(self, what: str) -> None:
        self.console.print(f"  {what} [dim]({self.budget.left_s:.0f} s left)[/dim]")

    def each(self, names: Sequence[str], measure: Callable[[str], list[Row]]) -> list[Row]:
        """Rows of each name, with an equal share of the time left. One that fails does not end the others."""
        rows, left_s = list[Row](), self.budget.left_s
        for at, name in enumerate(names):
            share_s = left_s / (len(names) - at)
            self.budget = Budget(share_s)
            rows += self.guarded(name, lambda name=name: measure(name))  # type: ignore[misc]
            left_s -= share_s - self.budget.left_s
            self.clean()
        return rows

    def guarded(self, what: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Rows, or one that says why there are none."""
        if self.budget.left_s <= 0:
            return [Row(what=what, note="no time left")]
        try:
            return measure()
        except Exception as error:
            self.console.print(traceback.format_exc(), markup=False, highlight=False)
            note = f"failed: {type(error).__name__}: {error}"[:300]
        self.clean()
        return [Row(what=what, note=note)]

    def tokens(self, count: int) -> int:
        """A length, or a small one in its place."""
        return max(count // TINY_DIVISOR, 1) if self.tiny else count

    def batches(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size in sizes if size <= TINY_BATCH) if self.tiny else sizes

    def steps(self, count: int) -> int:
        return TINY_STEPS if self.tiny else count

    def prompts(self, count: int, length: int, vocab: int) -> list[list[int]]:
        """Prompts of random tokens, new ones every time."""
        self._seed += 1
        return np.random.default_rng(self._seed).integers(0, vocab, (count, length)).tolist()  # type: ignore[no-any-return]

    def make(self, name: str) -> Made:
        """Not counted as time of the part: the first one imports transformers."""
        with self.budget.uncounted():
            began = time.monotonic()
            made = make(name, self.device, tiny=self.tiny)
            self.wait()
            self.say(f"{name}: made in {time.monotonic() - began:.1f} s")
            return made

    def spec(self, made: Made, kv_dtype: str | None = None) -> ModelSpec:
        dtype = "fp32" if self.device == "cpu" else "bf16"
        page_tokens = TINY_PAGE if self.tiny else None
        return from_config(made.config.to_dict(), kv_dtype=kv_dtype or dtype, model_dtype=dtype, page_tokens=page_tokens)

    def bytes_of(self, made: Made, tokens: int) -> int:
        """Memory for `tokens`, and a little more for what else requests hold."""
        spec = self.spec(made)
        return max(int(tokens * spec.bytes_per_token * 1.08) + 64 * spec.checkpoint_bytes(), LEAST_TIER_BYTES)

    def engine(
        self, made: Made, *, device_bytes: int | None, host_bytes: int = 0, text: Tokenizer | None = None, **settings: Any,
    ) -> Engine:  # fmt: skip
        """`device_bytes` None: as much as the engine takes by default."""
        if self.tiny:
            settings["page_tokens"] = TINY_PAGE
        config = EngineConfig(
            device=self.device,
            device_memory=1 << 28 if device_bytes is None and self.tiny else device_bytes,
            host_memory=host_bytes,
            limits=Limits(max_running=64, chunk_tokens=TINY_CHUNK if self.tiny else CHUNK_TOKENS),
            **settings,
        )
        checkpoint = held(made.name, made.model)
        if text is not None:
            checkpoint = replace(checkpoint, text=text, eos_ids=text.eos_ids)
        return build_engine(checkpoint, config)

    def clean(self) -> None:
        """Frees unused memory."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device has done its work."""
        if self.device != "cpu":
            torch.cuda.synchronize()
