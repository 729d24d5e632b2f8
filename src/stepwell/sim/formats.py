"""The three formats of a line of a trace file. Pure: a parsed line in, a request out, or a TraceError.

stepwell   {"t": 19.0, "session": 0, "in": 31983, "out": 704, "runs": [[4503599632547840, 235], [16777452, 264]]}
           after a header line {"format": "stepwell-trace", "version": 1, "block_tokens": 64}
mooncake   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}   blocks of 512
tokens     {"tokens": [1, 2, 3], "t": 0.5, "session": "a", "out": 10}   or just [1, 2, 3]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import numpy as np
import xxhash

from stepwell.base.errors import BadTokens, StepwellError
from stepwell.base.prompt import TOKEN_BYTES, pack
from stepwell.sim.trace import LEAST_BLOCK_TOKENS, MAX_BLOCK_ID, BlockIds, TraceRequest

FORMAT, VERSION = "stepwell-trace", 1
MOONCAKE_BLOCK_TOKENS = 512
TOKENS_BLOCK_TOKENS = 16  # of prompts given as tokens: divides the pages of every model
MOST_PROMPT_TOKENS = 2**24
MOST_BLOCK_TOKENS = 2**16

Fields = Mapping[str, Any]
Parse = Callable[[Any], TraceRequest]


class TraceError(StepwellError):
    """A trace that cannot be read; the message names the file and the line."""


def block_tokens_of_header(header: Fields) -> int:
    """Checks the first line of a stepwell trace; returns the size of its blocks."""
    if header.get("version") != VERSION:
        raise TraceError(f"version {header.get('version')!r:.40} of {FORMAT} is not known; this reads version {VERSION}")
    block_tokens = _whole(header, "block_tokens", least=LEAST_BLOCK_TOKENS)
    if block_tokens > MOST_BLOCK_TOKENS:
        raise TraceError(f"block_tokens must be at most {MOST_BLOCK_TOKENS}, got {block_tokens}")
    return block_tokens


def stepwell_parser(block_tokens: int) -> Parse:
    def parse(line: Any) -> TraceRequest:
        fields = _object(line)
        prompt_tokens = _prompt_tokens(fields, "in")
        return TraceRequest(
            at_s=_number(fields, "t"),
            session=str(fields.get("session", ""))[:80],
            prompt_tokens=prompt_tokens,
            output_tokens=_whole(fields, "out", default=0),
            blocks=_covering(_from_runs(fields, prompt_tokens, block_tokens), prompt_tokens, block_tokens),
        )

    return parse


def parse_mooncake(line: Any) -> TraceRequest:
    fields = _object(line)
    prompt_tokens = _prompt_tokens(fields, "input_length")
    blocks = _ids(fields.get("hash_ids"), "hash_ids")
    return TraceRequest(
        at_s=_number(fields, "timestamp") / 1000,
        session="",
        prompt_tokens=prompt_tokens,
        output_tokens=_whole(fields, "output_length", default=0),
        blocks=_covering(blocks, prompt_tokens, MOONCAKE_BLOCK_TOKENS),
    )


def parse_tokens(line: Any) -> TraceRequest:
    """Blocks are named by a chained hash, so that equal names are equal tokens with equal history."""
    fields = {"tokens": line} if isinstance(line, list) else _object(line)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TraceError("`tokens` must be a list of token ids that is not empty")
    if len(tokens) > MOST_PROMPT_TOKENS:
        raise TraceError(f"a prompt of {len(tokens)} tokens; at most {MOST_PROMPT_TOKENS} can be replayed")
    try:
        packed = pack(tokens)
    except BadTokens as error:
        raise TraceError(str(error)) from None
    return TraceRequest(
        at_s=_number(fields, "t", default=0.0),
        session=str(fields.get("session", ""))[:80],
        prompt_tokens=len(tokens),
        output_tokens=_whole(fields, "out", default=0),
        blocks=_named(packed, TOKENS_BLOCK_TOKENS * TOKEN_BYTES),
    )


def _named(packed: bytes, block_bytes: int) -> BlockIds:
    """A name for each whole block; the rest is a tail."""
    count = len(packed) // block_bytes
    names = np.empty(count, np.int64)
    name = 0
    for at in range(count):
        name = xxhash.xxh3_64_intdigest(packed[at * block_bytes : (at + 1) * block_bytes], seed=name) % MAX_BLOCK_ID
        names[at] = name
    return names


def _from_runs(fields: Fields, prompt_tokens: int, block_tokens: int) -> BlockIds:
    runs = fields.get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, list) and len(run) == 2 for run in runs):
        raise TraceError("`runs` must be a list of [first id, count] pairs")
    most = -(-prompt_tokens // block_tokens)
    pieces, total = [], 0
    for first, count in runs:
        if type(first) is not int or type(count) is not int or first < 0 or count < 1 or first + count > MAX_BLOCK_ID:
            raise TraceError(f"[{first!r:.40}, {count!r:.40}] is not a run: block ids are 0 .. 2^53 - 1, and counts 1 or more")
        total += count
        if total > most:
            raise TraceError(f"`runs` name more than the {most} blocks of {block_tokens} that {prompt_tokens} tokens have")
        pieces.append(np.arange(first, first + count, dtype=np.int64))
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _ids(value: object, name: str) -> BlockIds:
    if not isinstance(value, list):
        raise TraceError(f"`{name}` must be a list of block ids")
    try:
        ids = np.asarray(value if value else np.empty(0, np.int64))
    except (ValueError, OverflowError):
        raise TraceError(f"`{name}` must be a flat list of whole numbers") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= MAX_BLOCK_ID)):
        raise TraceError(f"`{name}` must be a flat list of whole numbers from 0 to 2^53 - 1")
    return ids.astype(np.int64)


def _covering(blocks: BlockIds, prompt_tokens: int, block_tokens: int) -> BlockIds:
    if len(blocks) > -(-prompt_tokens // block_tokens):
        raise TraceError(f"{len(blocks)} blocks of {block_tokens} are more than {prompt_tokens} tokens have")
    return blocks


def _object(line: Any) -> Fields:
    if not isinstance(line, dict):
        raise TraceError(f"a request must be a JSON object, got {type(line).__name__}")
    return line


def _prompt_tokens(fields: Fields, name: str) -> int:
    tokens = _whole(fields, name, least=1)
    if tokens > MOST_PROMPT_TOKENS:
        raise TraceError(f"a prompt of {tokens} tokens; at most {MOST_PROMPT_TOKENS} can be replayed")
    return tokens


def _whole(fields: Fields, name: str, *, least: int = 0, default: int | None = None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or value < least:
        raise TraceError(f"`{name}` must be a whole number of at least {least}, got {value!r:.40}")
    return value


def _number(fields: Fields, name: str, *, default: float | None = None) -> float:
    value = fields.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= 1e12 or not isfinite(value):
        raise TraceError(f"`{name}` must be a time of 0 or more, got {value!r:.40}")
    return float(value)
