"""Whatever comes through the socket of a shared log costs its sender a connection, and other clients nothing."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_peer import HERE
from shared_log_fixtures import OpenHere

from stepwell.base.ids import Level
from stepwell.store.api import NO_PARENT, ReadOutcome, ReadResult, WriteOutcome
from stepwell.store.keyed_seal import verify_without_key
from stepwell.store.seal import Verdict
from stepwell.store.shared import connection, memory, server, wire
from stepwell.store.shared.connection import SOCKET_NAME, Connection, Deadline, Gone, Late, Stranger, connect, listen
from stepwell.store.shared.settings import Settings, pack_settings, parse_settings
from stepwell.store.shared.store import SharedLog
from stepwell.store.shared.wire import Keys, Kind, Malformed, Places, Reading, Relevelling, Writing
from stepwell.testing.store_contract import fetch, key, offer
from waiting import PATIENCE_S, wait_until

KIB = 1024
WRITE = offer(HERE, "stranger", 5000)
MESSAGES = [
    wire.pack_frame(Kind.HELLO),
    wire.pack_frame(Kind.CONTAINS, wire.pack_keys(Keys(HERE, [key("x"), key("y")]))),
    wire.pack_frame(Kind.DELETE, wire.pack_keys(Keys(HERE, [key("none")]))),
    wire.pack_frame(Kind.READ, wire.pack_reading(Reading(HERE, [key("x")], Places([0], [5000])))),
    wire.pack_frame(
        Kind.WRITE,
        wire.pack_writing(Writing(HERE, [WRITE.key], [WRITE.stamp], [NO_PARENT], [0], [Level.NORMAL], Places([0], [5000]))),
    ),
]


@pytest.fixture
def owner(open_here: OpenHere) -> Iterator[SharedLog]:
    """An owner that has a value, and still has it when the test ends; so has a client that was there all the time."""
    store, client = open_here(), open_here()
    store.write_from(HERE, [offer(HERE, "x", 5000)])
    assert fetch(client, HERE, "x", 5000) is not None
    yield store
    for each in (client, store, open_here()):
        assert fetch(each, HERE, "x", 5000) is not None and not fetch(each, HERE, "stranger", 5000)
    assert store._server is not None
    assert store.owns and client.write_from(HERE, [offer(HERE, "y", 5000)]) == [WriteOutcome.STORED]


@contextmanager
def dialled(directory: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(PATIENCE_S)
        raw.connect(str(directory / SOCKET_NAME))
        yield raw


def last_words(raw: socket.socket) -> bytes:
    """Everything that is said until the other side hangs up."""
    said = b""
    try:
        while part := raw.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    return said


# ---- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"not a message"),
        (struct.pack("<4sHHI", b"SwSL", wire.VERSION + 1, Kind.HELLO, 0), b"run one release"),
        (struct.pack("<4sHHI", b"SwSL", wire.VERSION, 999, 0), b"unknown kind"),
        (struct.pack("<4sHHI", b"SwSL", wire.VERSION, Kind.CONTAINS, 2**32 - 1), b"a frame of 4294967295 bytes"),
        (wire.pack_frame(Kind.DONE), b"not a request"),
        (wire.pack_frame(Kind.MEMORY, wire.pack_number(4096)), b"without its descriptor"),
        (wire.pack_frame(Kind.CONTAINS, b"short"), b"should be"),
        (wire.pack_frame(Kind.CLEAR, b"short"), b"the digest of a space in 5 bytes"),
        (MESSAGES[3], b"beyond the end of 0 bytes"),
        (MESSAGES[4], b"beyond the end of 0 bytes"),
    ],
)
def test_what_cannot_be_answered_is_said_and_hung_up_on(message: bytes, why: bytes, owner: SharedLog, directory: Path) -> None:
    with dialled(directory) as raw:
        raw.sendall(message)
        assert why in last_words(raw)


def test_random_and_damaged_messages_do_no_harm(owner: SharedLog, directory: Path) -> None:
    random = Random(3)
    for _ in range(300):
        message = bytearray(random.choice(MESSAGES))
        for _ in range(random.randrange(4)):
            message[random.randrange(len(message))] = random.randrange(256)
        if random.random() < 0.3:
            message = message[: random.randrange(len(message))]
        if random.random() < 0.1:
            message = bytearray(random.randbytes(random.randrange(200)))
        with dialled(directory) as raw:
            try:
                raw.sendall(message)
                raw.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it hung up already
            last_words(raw)


@given(body=st.binary(max_size=600), memory_bytes=st.integers(0, 10_000))
def test_any_bytes_are_parsed_or_malformed(body: bytes, memory_bytes: int) -> None:
    parsers: list[Callable[[], object]] = [
        lambda: wire.parse_header(body[:12].ljust(12, b"\0")),
        lambda: wire.parse_keys(body),
        lambda: wire.parse_reading(body, memory_bytes),
        lambda: wire.parse_writing(body, memory_bytes),
        lambda: wire.parse_results(body, 3),
        lambda: wire.parse_found(body, 3),
        lambda: wire.parse_outcomes(body, 3),
        lambda: wire.parse_number(body),
        lambda: parse_settings(body),
        lambda: wire.parse_text(body),
    ]
    for parse in parsers:
        try:
            parse()
        except Malformed:
            continue


def test_what_is_packed_is_parsed() -> None:
    places = Places((0, 4096), (4096, 10))
    keys, stamps = [key("a"), key("b")], [b"1" * 64, b"2" * 64]
    assert wire.parse_keys(wire.pack_keys(Keys(HERE, keys))) == Keys(HERE, keys)
    reading, writing = Reading(HERE, keys, places), Writing(HERE, keys, stamps, keys, (0, 2**32 - 1), [*Level][:2], places)
    assert wire.parse_reading(wire.pack_reading(reading), 5000) == reading
    assert wire.parse_writing(wire.pack_writing(writing), 5000) == writing
    relevelling = Relevelling(HERE, keys, Level.VALUABLE)
    assert wire.parse_relevelling(wire.pack_relevelling(relevelling)) == relevelling
    with pytest.raises(Malformed, match="a level of 3"):
        wire.parse_relevelling(wire.pack_relevelling(relevelling)[:-1] + b"\x03")
    results = [ReadResult(outcome, b"s" * 64 if outcome is ReadOutcome.FOUND else b"") for outcome in ReadOutcome]
    assert wire.parse_results(wire.pack_results(results), len(results)) == results
    assert wire.parse_outcomes(wire.pack_outcomes(list(WriteOutcome)), len(WriteOutcome)) == list(WriteOutcome)
    settings = Settings(budget_bytes=1, segment_bytes=2, max_value_bytes=3, quotas={"a": 4})
    assert parse_settings(pack_settings(settings)) == settings
    for parse in (wire.parse_reading, wire.parse_writing):
        with pytest.raises(Malformed, match="beyond the end"):
            parse((wire.pack_reading if parse is wire.parse_reading else wire.pack_writing)(
                reading if parse is wire.parse_reading else writing  # type: ignore[arg-type]
            ), 4105)  # fmt: skip
    overlapping = Reading(HERE, keys, Places((0, 0), (4096, 4096)))
    with pytest.raises(Malformed, match="values of 8192 bytes in 5000"):
        wire.parse_reading(wire.pack_reading(overlapping), 5000)


def test_a_value_that_its_stamp_does_not_fit_is_not_written(owner: SharedLog, open_here: OpenHere) -> None:
    """The log writes values of several callers together, and after a crash believes all of them or none."""
    client = open_here()
    good = offer(HERE, "good", 5000)
    bad = offer(HERE, "stranger", 5000)._replace(data=memoryview(bytes(5000)))
    assert client.write_from(HERE, [bad, good]) == [WriteOutcome.FAILED, WriteOutcome.STORED]
    assert client.contains(HERE, [key("stranger"), key("good")]) == [False, True]


# ---- memory ---------------------------------------------------------------------------------------


def unsealed(size: int) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def sealed_against_growing_only(size: int) -> int:
    fd = unsealed(size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def a_file(size: int) -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, size)
    return fd


def huge(size: int) -> int:
    try:
        fd = os.memfd_create("x", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 21)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def read_only(size: int) -> int:
    fd = memory.make_memory(size)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("make", "claimed", "why"),
    [
        (unsealed, 64 * KIB, b"could be truncated"),
        (sealed_against_growing_only, 64 * KIB, b"could be truncated"),
        (a_file, 64 * KIB, b"not one of memory"),
        (lambda _: os.pipe()[0], 64 * KIB, b"not one of memory"),
        (read_only, 64 * KIB, b"cannot be mapped"),
        (huge, 64 * KIB, b"huge pages"),
        (memory.make_memory, 65 * KIB, b"memory of 65536 bytes, and not of 66560"),
        (memory.make_memory, 2**40, b"at most"),
        (memory.make_memory, 0, b"memory of 0 bytes"),
    ],
    ids=["unsealed", "growing", "file", "pipe", "read-only", "huge", "too small", "too large", "nothing"],
)
def test_memory_that_could_do_harm_is_refused(
    make: Callable[[int], int], claimed: int, why: bytes, owner: SharedLog, directory: Path
) -> None:
    fd = make(64 * KIB)
    try:
        with dialled(directory) as raw:
            socket.send_fds(raw, [wire.pack_frame(Kind.MEMORY, wire.pack_number(claimed))], [fd])
            assert why in last_words(raw)
    finally:
        os.close(fd)


def test_values_beyond_the_memory_and_stray_descriptors_are_refused(owner: SharedLog, directory: Path) -> None:
    fd = memory.make_memory(4096)
    before = len(os.listdir("/proc/self/fd"))
    for message in (MESSAGES[3], MESSAGES[4]):
        with dialled(directory) as raw:
            socket.send_fds(raw, [wire.pack_frame(Kind.MEMORY, wire.pack_number(4096))], [fd])
            raw.sendall(message)
            assert b"beyond the end of 4096 bytes" in last_words(raw)
    for count in (1, 2, 50):
        with dialled(directory) as raw:
            socket.send_fds(raw, [MESSAGES[0]], [fd] * count)
            assert (b"with a frame that has none" if count == 1 else b"more than one descriptor") in last_words(raw)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "every descriptor that came is closed")
    os.close(fd)


@pytest.mark.parametrize(
    ("kind", "size", "counts", "why"),
    [
        (Kind.MEMORY, 1 << 20, [], b"a number of 1048576 bytes"),
        (Kind.MEMORY, 8, [1, 1], b"more than one descriptor"),
        (Kind.MEMORY, 8, [2], b"more than one descriptor"),
        (Kind.CONTAINS, 1 << 20, [1], b"with a frame that has none"),
    ],
)
def test_descriptors_sent_one_by_one_are_not_kept(
    kind: Kind, size: int, counts: list[int], why: bytes, owner: SharedLog, directory: Path
) -> None:
    """None of these frames ever ends."""
    fd = memory.make_memory(4096)
    header = struct.pack("<4sHHI", b"SwSL", wire.VERSION, kind, size)
    try:
        with dialled(directory) as raw:
            if kind is Kind.CONTAINS:
                socket.send_fds(raw, [header], [fd])
            else:
                raw.sendall(header)
                for count in counts:
                    socket.send_fds(raw, [b"x"], [fd] * count)
            assert why in last_words(raw)
    finally:
        os.close(fd)


def test_a_value_that_is_changed_after_it_was_verified_is_written_as_it_was(
    owner: SharedLog, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = memory.make_memory(64 * KIB)
    good = offer(HERE, "good", 5000)
    memory.copy_in(fd, [4096], [good.data])

    def verify_then_change(*args: Any) -> Verdict:
        verdict = verify_without_key(*args)
        os.pwrite(fd, bytes(64 * KIB), 0)  # as its sender may at any moment
        return verdict

    monkeypatch.setattr(server, "verify_without_key", verify_then_change)
    called = connect(directory, Deadline(PATIENCE_S))
    called.ask(Kind.MEMORY, wire.pack_number(64 * KIB), Deadline(PATIENCE_S), fd=fd)
    writing = Writing(HERE, [good.key], [good.stamp], [NO_PARENT], [0], [Level.NORMAL], Places([4096], [5000]))
    answer = called.ask(Kind.WRITE, wire.pack_writing(writing), Deadline(PATIENCE_S))
    assert wire.parse_outcomes(answer.body, 1) == [WriteOutcome.STORED]
    assert fetch(owner, HERE, "good", 5000) is not None
    called.close()
    os.close(fd)


# ---- users ----------------------------------------------------------------------------------------

CALL = """
import os, socket, sys
directory = os.open(sys.argv[1], os.O_PATH)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
    try:
        raw.connect(f"/proc/self/fd/{directory}/socket")
        raw.sendall(bytes.fromhex(sys.argv[2]))
        print("heard", len(raw.recv(1000)))
    except PermissionError:
        print("forbidden")
    except OSError:
        print("heard 0")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_the_file_and_by_the_owner(owner: SharedLog, directory: Path) -> None:
    def call() -> str:
        command = [sys.executable, "-c", CALL, str(directory), MESSAGES[0].hex()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert (directory / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    assert call() == "forbidden"
    directory.chmod(0o755)
    (directory / SOCKET_NAME).chmod(0o666)
    assert call() == "heard 0", "it was not even asked what it wanted"


def test_both_sides_ask_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(tmp_path) as listening:
        accepted = connect(tmp_path, Deadline(PATIENCE_S))
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(Stranger, match="and this one to 12345"):
            connect(tmp_path, Deadline(PATIENCE_S))
        with pytest.raises(Stranger, match="and this one to 12345"):
            Connection(listening.accept()[0])
        accepted.close()


# ---- an owner that is none ------------------------------------------------------------------------


def test_a_silent_or_lying_owner_is_an_error_in_time(tmp_path: Path) -> None:
    with listen(tmp_path) as listening:
        silent = connect(tmp_path, Deadline(0.05))
        with pytest.raises(Late):
            silent.ask(Kind.HELLO, b"", Deadline(0.05))
        silent.close()
        lied_to = connect(tmp_path, Deadline(PATIENCE_S))
        listening.accept()[0].close()
        answering, _ = listening.accept()
        answering.sendall(b"HTTP/1.1 400 Bad Request")
        with pytest.raises(Malformed):
            lied_to.receive(deadline=Deadline(PATIENCE_S))
        answering.close()
        lied_to.close()
    with pytest.raises(Gone):
        connect(tmp_path, Deadline(PATIENCE_S))


def test_a_directory_with_a_long_path_has_its_socket_all_the_same(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120) / ("e" * 120)
    directory.mkdir(parents=True)
    with listen(directory):
        connect(directory, Deadline(PATIENCE_S)).close()
    connection.remove(directory)
    connection.remove(directory)
    assert not list(directory.iterdir())
