"""Connections without a request: a deadline for headers, and a limit on the number of waiting connections.

    connected ...... headers are whole ...... answered ...... first byte of the next request ...... headers are whole
    |---- HEADERS_S at most ----|             |- keep-alive --|------- HEADERS_S at most -------|

A waiting connection costs an open file. When more than MOST_IDLE wait, the one that has waited longest is closed, so that a
client that opens very many closes its own, and others still get in. `Admission` limits the number of open requests. Made for
uvicorn's HTTP/1.1, whose own limits begin with the first whole request. Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from stepwell.server.errors import ApiError, ErrorResponse

HEADERS_S = 20.0
MOST_IDLE = 1024
_EVERY_S = 60.0  # between log lines

log = logging.getLogger(__name__)


class IdleConnections:
    """The connections of one server that wait for headers, oldest first."""

    def __init__(self, on_error: Callable[[int], None]) -> None:
        """`on_error` is called with the status of each error sent here."""
        self.on_error = on_error
        self._oldest_first: dict[Connection, None] = {}
        self._closed = 0  # since the last line of the log
        self._logged_s = float("-inf")

    def protocol(self, **more: Any) -> Connection:
        """Makes a connection, for uvicorn."""
        return Connection(self, **more)

    def add(self, connection: Connection) -> None:
        self._oldest_first[connection] = None
        if len(self._oldest_first) > MOST_IDLE:
            oldest = next(iter(self._oldest_first))
            self.discard(oldest)
            oldest.close()
            self.note_closed()

    def discard(self, connection: Connection) -> None:
        self._oldest_first.pop(connection, None)

    def note_closed(self) -> None:
        """Counts a connection closed without a whole request. Logs the count once a minute at most."""
        self._closed += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._logged_s + _EVERY_S:
            log.warning(
                "closed connections that sent no whole request within %g s, or were the oldest of more than %d: %d",
                HEADERS_S, MOST_IDLE, self._closed,
            )  # fmt: skip
            self._logged_s, self._closed = now_s, 0


class Connection(H11Protocol):
    def __init__(self, idle: IdleConnections, **more: Any) -> None:
        super().__init__(**more)
        self._idle = idle
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def close(self) -> None:
        """Closes an idle connection."""
        self._stop_waiting()
        self.timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Responds to input that is not HTTP, unless a response is already being sent."""
        if self.cycle is None or self.cycle.response_complete:
            self._send(ApiError(400, f"{msg} Send HTTP/1.1", code="invalid_http"))
        self.transport.close()

    def _look(self) -> None:
        """Starts the deadline if the connection waits for headers, unless uvicorn's keep-alive timer runs."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
            return
        if self._deadline is None and self.timeout_keep_alive_task is None:
            self._deadline = self.loop.call_later(HEADERS_S, self._is_late)
        self._idle.add(self)

    def _stop_waiting(self) -> None:
        self._idle.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        """Responds to half a request only: a browser that preconnected would take the response for that of its next request."""
        if self.conn.trailing_data[0]:
            self._send(ApiError(408, f"the request's headers did not arrive within {HEADERS_S:g} s", code="headers_timeout"))
        self._idle.note_closed()
        self.close()

    def _send(self, error: ApiError) -> None:
        """Writes the response directly: h11 refuses to send after a protocol error in the middle of a request."""
        response = ErrorResponse.of(error, close=True)
        lines = [b"HTTP/1.1 %d %s" % (error.status, STATUS_PHRASES[error.status])]
        lines += [b"%s: %s" % each for each in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self._idle.on_error(error.status)
