"""The cost of constrained decoding in a decode step, compared with the same requests without a grammar.

A pass with such a request is read before the next begins, since its tokens decide what may follow; masks are built while the
device computes. Random weights write allowed nonsense, which is as much work for the grammar.
"""

from __future__ import annotations

import json
import random
import statistics

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gpu.bench import Bench
from gpu.requests import Steady, warm_up
from gpu.shapes import LLAMA
from report import Row
from stepwell.engine.engine import Engine
from stepwell.engine.loading.tokenizer import Tokenizer
from stepwell.engine.requests.guided import Grammar, Guide, Kind

BATCHES, CONTEXT, STEPS = (1, 8, 32), 2048, 60
END, LETTERS = "<eos>", 'etaoinshrdlcumwfgypbvk0123456789_-:,."{}[]Ġ'
_ITEM = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "size": {"type": "integer"},
                                     "color": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "size", "color"], "additionalProperties": False,
}  # fmt: skip
GRAMMARS = {
    "a JSON object": Grammar(kind=Kind.JSON_SCHEMA, source=json.dumps({"type": "array", "items": _ITEM, "minItems": 1000})),
    "a pattern": Grammar(kind=Kind.REGEX, source=r"(\d{4}-\d{2}-\d{2} [a-z]{1,12}\n){500,}"),
}  # fmt: skip


def measure(bench: Bench) -> list[Row]:
    made = bench.make(LLAMA)
    engine = bench.engine(made, device_bytes=None, text=_tokenizer(_words(made.config.vocab_size)))
    del made
    bench.clean()
    rows: list[Row] = []
    try:
        warm_up(bench, engine)
        assert engine.guides is not None
        guides = {name: engine.guides.compile(grammar) for name, grammar in GRAMMARS.items()}
        for batch in bench.batches(BATCHES):
            rows += bench.guarded(f"batch {batch}", lambda batch=batch: _batch(bench, engine, batch, guides))  # type: ignore[misc]
    finally:
        engine.close()
    return rows


def _words(count: int) -> list[str]:
    """Made-up words, one a token, with all bytes, as byte-level vocabularies write them; the same every time."""
    draw, made = random.Random(1), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(made) < count - 1:
        made["".join(draw.choice(LETTERS) for _ in range(draw.choice([2, 3, 3, 4, 5, 6])))] = None
    return [*made, END]


def _tokenizer(vocab: list[str]) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(vocab)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens([END])
    return Tokenizer(made, eos_ids=[len(vocab) - 1])


def _batch(bench: Bench, engine: Engine, batch: int, guides: dict[str, Guide]) -> list[Row]:
    free_ms = _step_ms(bench, engine, batch, None)
    rows = []
    for name, guide in guides.items():
        step_ms = _step_ms(bench, engine, batch, guide)
        bench.say(f"batch {batch}, {name}: {step_ms:.2f} ms a step, {free_ms:.2f} without")
        figures = {"step, ms": step_ms, "without a grammar, ms": free_ms, "times": step_ms / free_ms}
        rows.append(Row(what=f"{LLAMA}, batch {batch}, {name}", figures=figures))
    return rows


def _step_ms(bench: Bench, engine: Engine, batch: int, guide: Guide | None) -> float:
    prompts, steps = bench.prompts(batch, bench.tokens(CONTEXT), engine.vocab_size), bench.steps(STEPS)
    with Steady(bench, engine, prompts, steps=steps, guide=guide) as steady:
        return statistics.median(steady.times(steps)) * 1e3
