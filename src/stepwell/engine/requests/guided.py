"""Constrained decoding: the tokens that may come next under a grammar. Wraps `llguidance`, which is imported on first use.

    prepare    once an engine, before the first request: the library reads the vocabulary, and holds the interpreter meanwhile
    compile    once a grammar, on a thread of the server's: bounded by its size, by fuel, and by a trial in a process of its
               own (`guided_trial.py`), so that no client can ask for more
    follow     once an answer: reads its tokens as they come, and says what may follow them and a draft's guesses

A grammar is compiled for one vocabulary. Its state follows from the tokens of an answer alone. Models that think first may do
so: then the grammar begins after the token that ends their thoughts.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import ConfigError
from stepwell.engine.ops.editing import WORD_BITS, words_for
from stepwell.engine.requests import guided_trial, schemas
from stepwell.engine.requests.text import Text

log = logging.getLogger(__name__)

MAX_SOURCE = 64 << 10  # characters
KEPT_BYTES = 128 << 20  # of compiled grammars that are kept
_BASE_BYTES, _BYTES_PER_CHARACTER = 64 << 10, 64  # of one, at most: measured with schemas, choices and regexes of up to 64 Ki
_LONG_S = 1.0  # of the start, that the log explains
_TRIAL_S = 30.0  # for what has its CPU time bounded, on a machine that is busy
NEEDS_EXTRA = "guided output needs llguidance, which is not installed on the server: pip install 'llguidance>=1.7'"

_NOTHING_FITS = "NoExtensionBias"  # the library's word for it
_ENDLESS = 'no answer can begin, for it refers to nothing but itself, as {"$ref": "#"} does'


class Kind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # in Lark's or GBNF's form
    CHOICE = "choice"  # a list of strings, in JSON
    FRAMED = "framed"  # {"frame": Lark, "parts": {name: [kind, source]}}: Lark that refers to other grammars as @name, in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The grammar of an answer, as requested."""

    kind: Kind
    source: str


class OffGrammar(Exception):
    """The grammar exceeded its limits in the middle of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """The tokens around what a model may think before the answer that a grammar is for.

    prompt ... <open> thoughts <close> {"grammar": ...}     `begun`: the prompt ends with <open>
    prompt ... {"grammar": ...}                             not begun: the first token says whether it thinks at all
    """

    open: int
    close: int
    begun: bool

    def end(self, tokens: Sequence[int], since: int = 0) -> int | None:
        """How many tokens of an answer stand before its grammar; None while it thinks. `close` is looked for from `since` on."""
        if not self.begun and (not tokens or tokens[0] != self.open):
            return 0
        return next((at + 1 for at in range(since, len(tokens)) if tokens[at] == self.close), None)


class Guide:
    """A compiled grammar, and the thoughts that may stand before it. Any number of answers may follow it."""

    def __init__(self, start: Any, vocab_size: int, eos_ids: frozenset[int], thoughts: Thoughts | None = None) -> None:
        self._start = start
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self.thoughts = thoughts

    def behind(self, thoughts: Thoughts) -> Guide:
        """The same grammar for answers that may think first."""
        return Guide(self._start, self._vocab_size, self._eos_ids, thoughts)

    def follow(self) -> Following:
        return Following(self._start.deep_copy(), self._vocab_size, self._eos_ids, self.thoughts)


class Following:
    """One answer's state in a grammar. One thread."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: frozenset[int], thoughts: Thoughts | None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._thoughts = thoughts
        self._thought = 0  # tokens of the answer that are thoughts for certain
        self._read = 0  # tokens of the answer that the matcher has seen, or need not see

    def allowed(self, answer: Sequence[int], guesses: Sequence[int] = ()) -> npt.NDArray[np.int32]:
        """A bit for each token that may follow an answer, which only grows, and guesses. Raises OffGrammar.

        After a guess that is not allowed the bits mean nothing: it is never chosen, and what follows it is dropped. While it
        thinks, an answer may continue with any token but one that ends it.
        """
        tokens = [*answer, *guesses]
        first = 0 if self._thoughts is None else self._thoughts.end(tokens, self._thought)
        if first is None:
            self._thought = len(answer)
            return self._all_but_ends
        if first <= len(answer):
            self._matcher.consume_tokens(tokens[max(self._read, first) : len(answer)])
            self._read = len(answer)
        words = self._behind(tokens[max(first, len(answer)) :])
        if self._thoughts is not None and not tokens and not self._thoughts.begun:
            at, bit = divmod(self._thoughts.open, WORD_BITS)
            words.view(np.uint32)[at] |= np.uint32(1 << bit)
        return words

    def _behind(self, guesses: list[int]) -> npt.NDArray[np.int32]:
        matcher = self._matcher
        ahead = matcher.try_consume_tokens(guesses) if guesses else 0
        words = np.zeros(words_for(self._vocab_size), np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise OffGrammar(matcher.get_error().splitlines()[0])
        if ahead:
            matcher.rollback(ahead)
        return words

    @cached_property
    def _all_but_ends(self) -> npt.NDArray[np.int32]:
        bits = np.zeros(words_for(self._vocab_size) * WORD_BITS, np.uint8)
        bits[: self._vocab_size] = 1
        bits[sorted(self._eos_ids)] = 0
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class KeptGuides:
    """Compiled grammars within a budget of bytes, for each tenant its own. Any number of threads may use it.

    When the budget is exceeded, the tenant that holds most loses the grammar that it used least recently: a tenant with many
    grammars evicts its own.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = Lock()
        self._by_tenant: dict[str | None, OrderedDict[Grammar, Guide]] = {}
        self._bytes: Counter[str | None] = Counter()

    def find(self, tenant: str | None, grammar: Grammar) -> Guide | None:
        with self._lock:
            kept = self._by_tenant.get(tenant, OrderedDict())
            if grammar in kept:
                kept.move_to_end(grammar)
            return kept.get(grammar)

    def add(self, tenant: str | None, grammar: Grammar, guide: Guide) -> None:
        """Keeps a grammar, and evicts others until all fit."""
        with self._lock:
            kept = self._by_tenant.setdefault(tenant, OrderedDict())
            if grammar not in kept:
                self._bytes[tenant] += _size_bytes(grammar)
            kept[grammar] = guide
            while self._bytes.total() > self._budget_bytes:
                self._evict()

    def _evict(self) -> None:
        tenant = max(self._bytes, key=self._bytes.__getitem__)
        evicted, _ = self._by_tenant[tenant].popitem(last=False)
        self._bytes[tenant] -= _size_bytes(evicted)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._bytes[tenant]


def _size_bytes(grammar: Grammar) -> int:
    """The most memory of a compiled grammar, by the length of its source: the library does not say."""
    return _BASE_BYTES + _BYTES_PER_CHARACTER * len(grammar.source)


class Guides:
    """Compiles grammars for one model, and keeps them within a budget. Any number of threads may ask, and compile at once."""

    def __init__(self, text: Text, *, vocab_size: int, eos_ids: frozenset[int], kept_bytes: int = KEPT_BYTES) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._kept = KeptGuides(kept_bytes)
        self._reading = Lock()  # the vocabulary
        self._read: Any = None  # the library's view of the vocabulary

    def prepare(self) -> None:
        """Reads the vocabulary now: seconds for a large one, in which no other thread runs. If it cannot be read, or the library
        is missing, the log says so, and requests with a grammar are refused.
        """
        began_s = time.monotonic()
        try:
            self._tokenizer()
        except (ConfigError, ValueError) as error:
            log.info("requests that ask for a format or a grammar are refused: %.500s", error)
            return
        if (took_s := time.monotonic() - began_s) >= _LONG_S:
            log.info("the vocabulary for formats and grammars was read in %.1f s", took_s)

    def compile(self, grammar: Grammar, *, tenant: str | None = None) -> Guide:
        """Raises ConfigError for what is no grammar, or too large a one, and where the library is missing.

        `tenant` has a share of the kept grammars. Tenants do not share compiled grammars.
        """
        if len(grammar.source) > MAX_SOURCE:
            raise ConfigError(f"a grammar may have {MAX_SOURCE} characters, got {len(grammar.source)}: make it smaller")
        guide = self._kept.find(tenant, grammar)
        if guide is None:
            guide = self._compiled(grammar)
            self._kept.add(tenant, grammar, guide)
        return guide

    def _compiled(self, grammar: Grammar) -> Guide:
        library = _library()
        try:
            grammar = _followable(grammar)
            _must_compile_in_time(grammar)
            start = guided_trial.started(library, self._tokenizer(), grammar.kind.value, grammar.source)
        except RecursionError:
            raise ConfigError(f"the {_called(grammar)} is nested too deeply to be followed") from None
        except ValueError as error:
            raise ConfigError(f"the {_called(grammar)} cannot be followed: {error!s:.500}") from None
        if start.is_error():
            why = schemas.in_plain_words(start.get_error())
            raise ConfigError(f"the {_called(grammar)} cannot be followed: {why:.500}")
        guide = Guide(start, self._vocab_size, self._eos_ids)
        try:  # what is too much for the first token is found here, and not in a pass
            guide.follow().allowed(())
        except OffGrammar as error:
            if str(error).startswith(_NOTHING_FITS):
                raise ConfigError(f"the {_called(grammar)} cannot be followed: {_ENDLESS}") from None
            raise ConfigError(f"the {_called(grammar)} is too complex: {error!s:.500}") from None
        for left_out in start.get_grammar_warnings():  # only where the schema allows that
            log.info("answers follow a schema in part, as it is not strict: %.500s", left_out)
        return guide

    def _tokenizer(self) -> Any:
        """The library's view of the vocabulary. Raises ConfigError, and ValueError for a tokenizer that it cannot read."""
        library = _library()
        if not self._eos_ids:
            raise ConfigError("guided output needs a token that ends answers, and this model names none")
        with self._reading:
            if self._read is None:
                vocabulary = self._text.to_json()
                self._read = library.LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids))
            return self._read


def _followable(grammar: Grammar) -> Grammar:
    """The same, with schemas in the library's words. Raises ValueError, and RecursionError."""
    if grammar.kind is Kind.JSON_SCHEMA:
        return replace(grammar, source=schemas.followable(grammar.source))
    if grammar.kind is not Kind.FRAMED:
        return grammar
    asked = json.loads(grammar.source)
    for part in asked["parts"].values():
        if part[0] == Kind.JSON_SCHEMA.value:
            part[1] = schemas.followable(part[1])
    return replace(grammar, source=json.dumps(asked))


def _must_compile_in_time(grammar: Grammar) -> None:
    """Raises ConfigError."""
    given = json.dumps({"kind": grammar.kind.value, "source": grammar.source, "path": sys.path}).encode()
    command = [sys.executable, "-I", guided_trial.__file__]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=_TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        ended = True
    else:
        ended = done.returncode != 0
    if ended:
        raise ConfigError(f"the {_called(grammar)} is too complex: it takes too long, or too much memory, to compile")


def _called(grammar: Grammar) -> str:
    """The name that clients know, who know no frames."""
    return "grammar" if grammar.kind is Kind.FRAMED else grammar.kind.value


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ConfigError(NEEDS_EXTRA) from None
    return llguidance
