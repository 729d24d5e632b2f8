"""The messages between the processes that share a log, as bytes. Pure: packs and parses, touches no socket.

    frame    | magic 4 | version 2 | kind 2 | bytes of the body 4 | body |
    space    | digest 32 | bytes of the label 1 | bytes of the tenant 1 | label | tenant |
    columns  | count 4 | all keys | all stamps | ... |      one entry of fixed size for each value in every column

Messages hold no values: a frame says where they lie in the client's memory. Input may be wrong in any way: invalid input raises
Malformed, and nothing is allocated beyond the maximum size of a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from stepwell.base.ids import Level
from stepwell.store.api import (
    KEY_BYTES,
    MAX_LABEL_BYTES,
    MAX_TENANT_BYTES,
    NO_STAMP,
    STAMP_BYTES,
    ReadOutcome,
    ReadResult,
    Space,
    WriteOutcome,
)

VERSION = 1
MAX_BODY_BYTES = 1 << 20
MAX_VALUES = 4096  # of one frame
MAX_TEXT_BYTES = 4096
_MAGIC = b"SwSL"
HEADER = struct.Struct("<4sHHI")
_SPACE = struct.Struct(f"<{KEY_BYTES}sBB")
_COUNT = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_READ_OUTCOMES, _WRITE_OUTCOMES = tuple(ReadOutcome), tuple(WriteOutcome)  # sent as their position: new ones are appended
_CODE_OF_READ = {outcome: code for code, outcome in enumerate(_READ_OUTCOMES)}
_CODE_OF_WRITE = {outcome: code for code, outcome in enumerate(_WRITE_OUTCOMES)}

_Outcome = TypeVar("_Outcome", ReadOutcome, WriteOutcome)


class Malformed(Exception):
    """Bytes that no sender using this module produces. The message says what is wrong with them."""


class Kind(IntEnum):
    HELLO = 1  # nothing; answered by SETTINGS
    MEMORY = 2  # its size, with its descriptor attached; answered by DONE
    CONTAINS = 3
    READ = 4
    WRITE = 5
    DELETE = 6
    CLEAR = 7  # the digest of a space
    RELEVEL = 8
    SETTINGS = 64
    DONE = 65  # the answer to any request
    ERROR = 66  # the store refused: text
    RECOVERING = 67  # the owner is still recovering the log


class Header(NamedTuple):
    kind: Kind
    body_bytes: int


class Places(NamedTuple):
    """Where values lie in the client's memory."""

    offsets: Sequence[int]
    sizes: Sequence[int]


class Keys(NamedTuple):
    """CONTAINS and DELETE."""

    space: Space
    keys: Sequence[bytes]


class Reading(NamedTuple):
    """READ: requested values, and where to put them."""

    space: Space
    keys: Sequence[bytes]
    places: Places


class Writing(NamedTuple):
    """WRITE: values to store, and where they are."""

    space: Space
    keys: Sequence[bytes]
    stamps: Sequence[bytes]
    parents: Sequence[bytes]
    depths: Sequence[int]
    levels: Sequence[Level]
    places: Places


class Relevelling(NamedTuple):
    """RELEVEL: the new level of values."""

    space: Space
    keys: Sequence[bytes]
    level: Level


# ---- frames ---------------------------------------------------------------------------------------


def pack_frame(kind: Kind, body: bytes = b"") -> bytes:
    assert len(body) <= MAX_BODY_BYTES, f"a frame of {len(body)} bytes"
    return HEADER.pack(_MAGIC, VERSION, kind, len(body)) + body


def parse_header(header: bytes) -> Header:
    magic, version, kind, size = HEADER.unpack(header)
    if magic != _MAGIC:
        raise Malformed("this is not a message of a shared log")
    if version != VERSION:
        raise Malformed(
            f"it speaks version {version}, and this process version {VERSION}: run one release in all processes of a shared log"
        )
    if size > MAX_BODY_BYTES:
        raise Malformed(f"a frame of {size} bytes")
    try:
        parsed = Header(Kind(kind), size)
    except ValueError:
        raise Malformed(f"a frame of unknown kind {kind}") from None
    if parsed.kind is Kind.MEMORY and size != _NUMBER.size:  # a descriptor is kept until the body has arrived
        raise Malformed(f"a number of {size} bytes")
    return parsed


# ---- requests -------------------------------------------------------------------------------------


def pack_keys(request: Keys) -> bytes:
    return b"".join([_pack_space(request.space), _COUNT.pack(len(request.keys)), *request.keys])


def parse_keys(body: bytes) -> Keys:
    rest = _Rest(body)
    space, count = rest.space(), rest.count()
    found = Keys(space, rest.column(count, KEY_BYTES))
    rest.must_be_empty()
    return found


def pack_reading(request: Reading) -> bytes:
    count = _COUNT.pack(len(request.keys))
    return b"".join([_pack_space(request.space), count, *request.keys, *_pack_places(request.places)])


def parse_reading(body: bytes, memory_bytes: int) -> Reading:
    """The places lie within `memory_bytes`."""
    rest = _Rest(body)
    space, count = rest.space(), rest.count()
    found = Reading(space, rest.column(count, KEY_BYTES), rest.places(count, memory_bytes))
    rest.must_be_empty()
    return found


def pack_writing(request: Writing) -> bytes:
    count = len(request.keys)
    head = _pack_space(request.space) + _COUNT.pack(count)
    names = [*request.keys, *request.stamps, *request.parents]
    numbers = struct.pack(f"<{count}I", *request.depths) + bytes(request.levels)
    return b"".join([head, *names, numbers, *_pack_places(request.places)])


def parse_writing(body: bytes, memory_bytes: int) -> Writing:
    """The places lie within `memory_bytes`."""
    rest = _Rest(body)
    space, count = rest.space(), rest.count()
    keys, stamps = rest.column(count, KEY_BYTES), rest.column(count, STAMP_BYTES)
    parents, depths, levels = rest.column(count, KEY_BYTES), rest.numbers(count, "I"), rest.levels(count)
    found = Writing(space, keys, stamps, parents, depths, levels, rest.places(count, memory_bytes))
    rest.must_be_empty()
    return found


def pack_relevelling(request: Relevelling) -> bytes:
    return b"".join([_pack_space(request.space), _COUNT.pack(len(request.keys)), *request.keys, bytes([request.level])])


def parse_relevelling(body: bytes) -> Relevelling:
    rest = _Rest(body)
    space, count = rest.space(), rest.count()
    found = Relevelling(space, rest.column(count, KEY_BYTES), rest.levels(1)[0])
    rest.must_be_empty()
    return found


# ---- answers --------------------------------------------------------------------------------------


def pack_found(found: Sequence[bool]) -> bytes:
    return bytes(found)


def parse_found(body: bytes, count: int) -> list[bool]:
    if len(body) != count or not set(body) <= {0, 1}:
        raise Malformed(f"{len(body)} answers to {count} questions")
    return [one == 1 for one in body]


def pack_results(results: Sequence[ReadResult]) -> bytes:
    codes = bytes([_CODE_OF_READ[result.outcome] for result in results])
    return codes + b"".join([result.stamp for result in results if result.outcome is ReadOutcome.FOUND])


def parse_results(body: bytes, count: int) -> list[ReadResult]:
    rest = _Rest(body)
    outcomes = [_of_code(_READ_OUTCOMES, code) for code in rest.take(count)]
    stamps = iter(rest.column(outcomes.count(ReadOutcome.FOUND), STAMP_BYTES))
    rest.must_be_empty()
    return [ReadResult(each, next(stamps) if each is ReadOutcome.FOUND else NO_STAMP) for each in outcomes]


def pack_outcomes(outcomes: Sequence[WriteOutcome]) -> bytes:
    return bytes([_CODE_OF_WRITE[outcome] for outcome in outcomes])


def parse_outcomes(body: bytes, count: int) -> list[WriteOutcome]:
    if len(body) != count:
        raise Malformed(f"{len(body)} answers to {count} writes")
    return [_of_code(_WRITE_OUTCOMES, code) for code in body]


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def parse_number(body: bytes) -> int:
    if len(body) != _NUMBER.size:
        raise Malformed(f"a number of {len(body)} bytes")
    return int(_NUMBER.unpack(body)[0])


def parse_digest(body: bytes) -> bytes:
    if len(body) != KEY_BYTES:
        raise Malformed(f"the digest of a space in {len(body)} bytes")
    return body


def pack_text(text: str) -> bytes:
    return text.encode(errors="replace")[:MAX_TEXT_BYTES]


def parse_text(body: bytes) -> str:
    return body[:MAX_TEXT_BYTES].decode(errors="replace")


# ---- inside ---------------------------------------------------------------------------------------


class _Rest:
    """The part of a body that is not parsed yet."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, size: int) -> bytes:
        taken = self._body[self._at : self._at + size]
        if len(taken) < size:
            raise Malformed(f"{len(taken)} bytes where {size} should be")
        self._at += size
        return taken

    def must_be_empty(self) -> None:
        if self._at != len(self._body):
            raise Malformed(f"{len(self._body) - self._at} bytes too many")

    def space(self) -> Space:
        digest, label_bytes, tenant_bytes = _SPACE.unpack(self.take(_SPACE.size))
        if label_bytes > MAX_LABEL_BYTES or tenant_bytes > MAX_TENANT_BYTES:
            raise Malformed(f"a label of {label_bytes} bytes, a tenant of {tenant_bytes}")
        try:
            return Space(digest=digest, label=self.take(label_bytes).decode(), tenant=self.take(tenant_bytes).decode())
        except UnicodeDecodeError:
            raise Malformed("a name that is not UTF-8") from None

    def count(self) -> int:
        (count,) = _COUNT.unpack(self.take(_COUNT.size))
        if not 1 <= count <= MAX_VALUES:
            raise Malformed(f"{count} values in one frame")
        return int(count)

    def column(self, count: int, size: int) -> list[bytes]:
        taken = self.take(count * size)
        return [taken[at : at + size] for at in range(0, len(taken), size)]

    def numbers(self, count: int, code: str) -> tuple[int, ...]:
        wanted = struct.Struct(f"<{count}{code}")
        return wanted.unpack(self.take(wanted.size))

    def levels(self, count: int) -> list[Level]:
        taken = self.take(count)
        if max(taken, default=0) > max(Level):
            raise Malformed(f"a level of {max(taken)}")
        return [Level(each) for each in taken]

    def places(self, count: int, memory_bytes: int) -> Places:
        offsets, sizes = self.numbers(count, "Q"), self.numbers(count, "Q")
        if any(offset + size > memory_bytes for offset, size in zip(offsets, sizes, strict=True)):
            raise Malformed(f"a value beyond the end of {memory_bytes} bytes of memory")
        if sum(sizes) > memory_bytes:
            raise Malformed(f"values of {sum(sizes)} bytes in {memory_bytes} bytes of memory")
        return Places(offsets, sizes)


def _pack_space(space: Space) -> bytes:
    label, tenant = space.label.encode(), space.tenant.encode()
    return _SPACE.pack(space.digest, len(label), len(tenant)) + label + tenant


def _pack_places(places: Places) -> tuple[bytes, bytes]:
    wanted = struct.Struct(f"<{len(places.offsets)}Q")
    return wanted.pack(*places.offsets), wanted.pack(*places.sizes)


def _of_code(outcomes: Sequence[_Outcome], code: int) -> _Outcome:
    if code >= len(outcomes):
        raise Malformed(f"an outcome of unknown code {code}")
    return outcomes[code]
