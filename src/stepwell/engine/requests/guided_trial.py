"""Compiles a grammar in a process of its own, which may be ended: `python guided_trial.py`, its kind and source given in JSON.

The library bounds the size of a grammar and the work for each token, not the time that it takes to compile: a `multipleOf` of a
million takes 14 s and 300 MB, an `allOf` of 40 patterns minutes. Nothing stops a thread, so such a grammar is tried here first,
for a vocabulary of bytes. Says nothing: what is wrong with a grammar that was compiled in time is found again where it is used.

Imports nothing else of ours, and begins fast.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LIMITS = {  # of memory and of the time that one mask takes; fuel is some 50,000 a millisecond before the first, then 14,000
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_items_in_row": 2_000,
    "max_lexer_states": 20_000, "max_grammar_size": 20_000, "verbose_errors": False,
}  # fmt: skip
MOST_S = 3  # of CPU time
MOST_BYTES = 2 << 30  # of address space; a process that does nothing takes a tenth
_SPACES = r"[ \n\r\t]{0,20}"  # between pieces of JSON: a model that likes spaces comes to an end


def started(library: Any, tokenizer: Any, kind: str, source: str) -> Any:
    """A matcher at a grammar's beginning, which may hold an error. Raises ValueError."""
    limits = library.LLParserLimits(**LIMITS)
    return library.LLMatcher(tokenizer, _written(library, kind, source), log_level=0, limits=limits)


def _written(library: Any, kind: str, source: str) -> str:
    """In the library's own form."""
    if kind == "json_schema":
        written: str = library.LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": _SPACES})
        return written
    if kind == "choice":
        choices = json.loads(source)
        written = library.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in choices))
        return written
    if kind == "framed":
        asked = json.loads(source)
        parts = [_part(library, name, *part) for name, part in asked["parts"].items()]
        return json.dumps({"grammars": [{"lark_grammar": asked["frame"]}, *parts]})
    written = library.grammar_from(kind, source)
    return written


def _part(library: Any, name: str, kind: str, source: str) -> dict[str, Any]:
    """A grammar that others refer to by name. The library writes some as JSON, and others as Lark."""
    written = _written(library, kind, source)
    if kind in ("grammar", "choice") and not written.lstrip().startswith("{"):
        return {"name": name, "lark_grammar": written}
    (inner,) = json.loads(written)["grammars"]
    return {**inner, "name": name}


def without_frame(kind: str, source: str) -> str:
    """What a client gave of a grammar. The frame is ours, and names tokens that no vocabulary of bytes has."""
    if kind != "framed":
        return source
    parts = json.loads(source)["parts"]
    return json.dumps({"frame": "start: " + " | ".join(f"@{name}" for name in parts), "parts": parts})


def _main() -> None:
    import resource

    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]  # the library is where it was found
    import llguidance

    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        source = without_frame(asked["kind"], asked["source"])
        start = started(llguidance, llguidance.LLTokenizer("byte"), asked["kind"], source)
        if not start.is_error():
            start.compute_bitmask()
    except (ValueError, RecursionError):
        pass


if __name__ == "__main__":
    _main()
