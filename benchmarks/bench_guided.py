"""What guided decoding costs by each of two libraries: grammars made ready, and the mask of each next token.

    make bench-guided        prints a line for each library and kind of grammar

A vocabulary of 128,000 made-up words, one document of JSON fed token by token. Both libraries have to be installed: it says how.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import tokenizers

from engine.made_up_words import tokenizer_of, words

VOCAB = 128_000
PROPERTIES = {f"field_{at}": {"type": "string", "maxLength": 40} for at in range(8)} | {
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    "point": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"],
              "additionalProperties": False},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
DOCUMENT = json.dumps(
    {f"field_{at}": "some words of text" for at in range(8)} | {"tags": ["red", "blue"], "point": {"x": 1.5, "y": -20}},
    separators=(", ", ": "),
)
LIBRARIES = ("llguidance", "xgrammar")
REGEX = r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})"
STAMP = "2026-11-17T16:00:00.125+01:00"


def report(name: str, load_s: float, ready: Callable[[str], tuple[float, list[float]]]) -> None:
    for what in ("schema", "regex"):
        first, masks = ready(what)
        ordered = sorted(masks)
        p99 = ordered[int(len(ordered) * 0.99)]
        print(f"{name:<11} {what:<7} load {load_s:5.2f} s  ready {first * 1e3:7.1f} ms  "
              f"mask median {statistics.median(masks) * 1e6:6.0f} us  p99 {p99 * 1e6:6.0f} us")  # fmt: skip


def by_llguidance(tokenizer: tokenizers.Tokenizer, eos: int) -> None:
    import llguidance
    import llguidance.numpy as masks

    began = time.perf_counter()
    made = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB, eos_token=eos)
    load_s = time.perf_counter() - began
    words = masks.allocate_token_bitmask(1, VOCAB)

    def ready(what: str) -> tuple[float, list[float]]:
        began = time.perf_counter()
        grammar = (llguidance.LLMatcher.grammar_from_json_schema(SCHEMA) if what == "schema"
                   else llguidance.LLMatcher.grammar_from_regex(REGEX))  # fmt: skip
        matcher = llguidance.LLMatcher(made, grammar)
        first, times = time.perf_counter() - began, []
        for token in tokenizer.encode(DOCUMENT if what == "schema" else STAMP).ids:
            began = time.perf_counter()
            masks.fill_next_token_bitmask(matcher, words, 0)
            times.append(time.perf_counter() - began)
            assert matcher.consume_token(token), matcher.get_error()
        return first, times

    report("llguidance", load_s, ready)


def by_xgrammar(tokenizer: tokenizers.Tokenizer, vocab: list[str], eos: int) -> None:
    import xgrammar

    began = time.perf_counter()
    info = xgrammar.TokenizerInfo(vocab, vocab_type=xgrammar.VocabType.BYTE_LEVEL, vocab_size=VOCAB, stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    load_s = time.perf_counter() - began
    words = xgrammar.allocate_token_bitmask(1, VOCAB)

    def ready(what: str) -> tuple[float, list[float]]:
        began = time.perf_counter()
        compiled = compiler.compile_json_schema(json.dumps(SCHEMA)) if what == "schema" else compiler.compile_regex(REGEX)
        matcher = xgrammar.GrammarMatcher(compiled)
        first, times = time.perf_counter() - began, []
        for token in tokenizer.encode(DOCUMENT if what == "schema" else STAMP).ids:
            began = time.perf_counter()
            matcher.fill_next_token_bitmask(words, 0)
            times.append(time.perf_counter() - began)
            assert matcher.accept_token(token)
        return first, times

    report("xgrammar", load_s, ready)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        wanted = " ".join(missing)
        sys.exit(f"not installed: {wanted}; {sys.executable} -m pip install --constraint constraints.txt {wanted}")
    vocab = words(VOCAB)
    tokenizer, eos = tokenizer_of(vocab), len(vocab) - 1
    by_llguidance(tokenizer, eos)
    by_xgrammar(tokenizer, vocab, eos)


if __name__ == "__main__":
    main()
