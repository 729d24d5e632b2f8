"""Runs the server: binds an address early, runs the engine's loop, and shuts down in order.

bind ... load the model ... serve until stopped ... answers end, backups end, stores close

The first stop signal lets running answers finish for a while and refuses new requests; the second ends the server at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn
from fastapi import FastAPI

from stepwell.base.config import StoreConfig
from stepwell.base.errors import ConfigError
from stepwell.engine.engine import Engine
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import Delta
from stepwell.server.access.admission import Admission
from stepwell.server.access.connections import IdleConnections
from stepwell.server.access.tenants import Principals, Tenant
from stepwell.server.ahead import PartSender
from stepwell.server.api.parsing.formats import AUTO, reasoning_of, tools_of
from stepwell.server.app import build_app
from stepwell.server.handover import Offers, Peers
from stepwell.server.kv_events.publisher import EventPublisher, EventSocket
from stepwell.server.monitoring.activity import History, LoadMeter, ThroughputLog
from stepwell.server.monitoring.metrics import Metrics
from stepwell.server.monitoring.progress import Progress
from stepwell.server.served import MAX_BODY_BYTES, Served
from stepwell.server.stores import Stores

if TYPE_CHECKING:
    from stepwell.server.monitoring.tracing import Traces

DRAIN_S = 30.0  # for running answers to finish after a stop signal
LAST_CALL_S = 5  # after that, for ended answers to send their error
KEEP_ALIVE_S = 30  # longer than clients keep idle connections, so that clients close them

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Binds an address without listening: connections are refused until the model is loaded. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from None
    return taken


def address_of(taken: socket.socket) -> str:
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ModelServer:
    """One engine behind one socket. `run` blocks, and closes everything passed to the constructor."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        chat: ChatTemplate,
        principals: Principals,
        aliases: tuple[str, ...] = (),
        default_max_tokens: int | None = None,
        request_timeout_s: float | None = None,
        tool_parser: str | None = AUTO,
        reasoning_parser: str | None = AUTO,
        defaults: Mapping[str, float | int | bool] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        hosts: tuple[str, ...] = (),
        open_metrics: bool = False,
        vllm_metrics: bool = False,
        hide_version: bool = False,
        drain_s: float = DRAIN_S,
        store: str | None = None,
        store_config: StoreConfig | None = None,
        events: EventSocket | None = None,
        offers: Offers | None = None,
        ahead: PartSender | None = None,
        peers: Peers | None = None,
        traces: Traces | None = None,
        read_tenants: Callable[[], Sequence[Tenant]] | None = None,
        sighup_received: Callable[[], bool] = lambda: False,
    ) -> None:
        """`store` names the store that the engine has opened; `store_config` is for stores attached later.

        `events` is where cache events are published. `offers`, already started, makes this a prefill server, and `ahead` sends
        parts of its prompts; `peers` makes it a decode server. `traces` gets a span for each request. `read_tenants` rereads the
        tenants file and raises ConfigError; it is called when `sighup_received`, polled several times a second, returns true.
        """
        self._events = None if events is None else EventPublisher(engine.cache, events)
        self._loop = EngineLoop(engine, after_step=self._after_step)
        metrics = Metrics(self._loop, name, name_tenants=not open_metrics, vllm_names=vllm_metrics)
        metrics.begin_at_zero(principals.names)
        self._progress = Progress(engine, metrics)
        self._load = LoadMeter(engine, self._progress.totals)
        self._history = History(engine, self._progress.totals)
        self._throughput = ThroughputLog(engine, self._progress.totals)
        self._stores = Stores(self._loop, store_config or StoreConfig(), store, principals)
        self.served = Served(
            loop=self._loop,
            name=name,
            text=engine.text,
            guides=engine.guides,
            chat=chat,
            tool_parser=tools_of(chat.source) if tool_parser == AUTO else tool_parser,
            reasoning_parser=reasoning_of(chat.source) if reasoning_parser == AUTO else reasoning_parser,
            max_context=engine.max_context,
            metrics=metrics,
            progress=self._progress,
            load=self._load,
            history=self._history,
            principals=principals,
            clock=engine.clock,
            aliases=aliases,
            default_max_tokens=default_max_tokens,
            request_timeout_s=request_timeout_s,
            defaults=defaults or {},
            max_body_bytes=max_body_bytes,
            hosts=hosts,
            open_metrics=open_metrics,
            hide_version=hide_version,
            offers=offers,
            ahead=ahead,
            peers=peers,
            traces=traces,
        )
        admission = Admission(engine.clock)
        config = _config(build_app(self.served, self._stores, admission), IdleConnections(self.served.metrics.refused))
        self._server = _Server(config, admission, drain_s, sighup_received)
        self._server.on_sighup = self.reload_tenants
        self._principals = principals
        self._read_tenants = read_tenants
        self._reloading = threading.Lock()

    def run(self, taken: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop`, or on the main thread until SIGINT or SIGTERM. Calls `on_ready` once it accepts requests."""
        if self.served.guides is not None:
            self.served.guides.prepare()  # before it listens: it holds the interpreter lock for long
        self._server.on_ready = on_ready
        self._server.on_drain_timeout = self._loop.abort_all
        if self._events is not None:
            self._events.start()
        self._loop.start()
        try:
            self._stores.start()
            self._server.run(sockets=[taken])
        finally:
            log.info("closing: finishing backups and copies, then closing the store")
            self._stores.close()
            self.served.compilers.shutdown(wait=False)
            self._loop.stop()
            if self.served.offers is not None:
                self.served.offers.close()
            if self.served.ahead is not None:
                self.served.ahead.close()
            if self.served.peers is not None:
                self.served.peers.close()
            if self._events is not None:
                self._events.close()
            if self.served.traces is not None:
                self.served.traces.close()
            taken.close()
            log.info("stopped")

    def reload_tenants(self) -> None:
        """Rereads the tenants file. If it is not valid, logs why and keeps the tenants. Any thread."""
        if self._read_tenants is None:
            log.info("SIGHUP ignored: this server has no --tenants file to reload")
            return
        with self._reloading:  # the file read last wins
            try:
                change = self._principals.replace(self._read_tenants())
            except ConfigError as error:
                log.error("tenants not reloaded: %s", error)
            else:
                self.served.metrics.begin_at_zero(self._principals.names)
                log.info("tenants reloaded", extra={"fields": change._asdict()})

    def _after_step(self, deltas: Sequence[Delta]) -> None:
        self._progress.after_step()
        self._load.after_step()
        self._history.after_step()
        self._throughput.after_step()
        if self._events is not None:
            self._events.take()

    def stop(self) -> None:
        """Ends `run` once running answers have finished or timed out. A second call ends them at once. Any thread."""
        self._server.stop()


def _config(app: FastAPI, idle: IdleConnections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", idle.protocol),  # uvicorn accepts any callable that returns one
        log_config=None,  # uvicorn writes to the same log
        log_level="warning",
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_CALL_S,
    )


class _Server(uvicorn.Server):
    """Calls `on_ready` when it listens. Stops when no request is open, or the drain time is over."""

    on_ready: Callable[[], None]
    on_drain_timeout: Callable[[], None]
    on_sighup: Callable[[], None]

    def __init__(self, config: uvicorn.Config, admission: Admission, drain_s: float, sighup_received: Callable[[], bool]) -> None:
        super().__init__(config)
        self._hung_up = sighup_received
        self._admission = admission
        self._drain_s = drain_s
        self._at_once = False
        self._stop_logged = False

    def stop(self) -> None:
        self._at_once = self._admission.closed_at_s is not None
        self._admission.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM. Does not raise the signal again, because the engine must still be closed."""
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._hung_up():
            asyncio.get_running_loop().run_in_executor(None, self.on_sighup)  # files may be slow
        if self._admission.closed_at_s is not None and not self._stop_logged:  # not in `stop`, which may interrupt a log line
            self._stop_logged = True
            log.info("stopping: %d request(s) may finish for %g s", self._admission.num_inside, self._drain_s)
        may_wait = not self._at_once and self._admission.closed_for_s() < self._drain_s
        if self._admission.closed_at_s is not None and not (self._admission.num_inside and may_wait):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends unfinished answers with an error event before closing connections."""
        if self._admission.num_inside:
            log.info("aborting %d request(s) that did not finish in time", self._admission.num_inside)
            self.on_drain_timeout()
        await super().shutdown(sockets=sockets)
