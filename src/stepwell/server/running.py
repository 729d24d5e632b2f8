"""Runs the server: an address taken early, an engine's loop around it, and an orderly end.

bind ... load the model ... serve until told to stop ... answers end, backups end, stores close

Told to stop, it lets running answers finish for a while and refuses new requests; told again, it ends at once.
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
from stepwell.server.access.connections import Idle
from stepwell.server.access.door import Door
from stepwell.server.access.principals import Principals, Tenant
from stepwell.server.ahead import Ahead
from stepwell.server.api.parsing.formats import AUTO, reasoning_of, tools_of
from stepwell.server.app import build_app
from stepwell.server.handover import Offers, Peers
from stepwell.server.kv_events.publisher import EventPublisher, EventSocket
from stepwell.server.monitoring.activity_log import ThroughputLog
from stepwell.server.monitoring.history import History
from stepwell.server.monitoring.load import LoadMeter
from stepwell.server.monitoring.metrics import Metrics
from stepwell.server.monitoring.progress import Progress
from stepwell.server.served import MAX_BODY_BYTES, Served
from stepwell.server.stores import Stores

if TYPE_CHECKING:
    from stepwell.server.monitoring.tracing import Traces

DRAIN_S = 30.0  # that answers have to finish when the server is told to stop
LAST_CALL_S = 5  # after that, for answers that are ended to say so
KEEP_ALIVE_S = 30  # longer than clients keep idle connections: they should be the ones to close

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Takes an address without listening yet: connections are refused until the model is loaded. Raises ConfigError."""
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
    """One engine behind one socket. `run` blocks, and closes everything it was given."""

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
        ahead: Ahead | None = None,
        peers: Peers | None = None,
        traces: Traces | None = None,
        read_tenants: Callable[[], Sequence[Tenant]] | None = None,
        hung_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`store`: what the engine has opened already, by name; `store_config` is for stores attached later.

        `events`: where to publish what is cached. `offers` makes it a prefill server, and has been started; `ahead` sends
        parts of what that computes; `peers` makes it a decode server, whose store is attached. `traces` gets a span of each
        request, and is closed with the server. `read_tenants` reads the tenants again, and raises ConfigError; None for a server
        without tenants. It is called when `hung_up`, which is polled several times a second, returns true.
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
        door = Door(engine.clock)
        config = _config(build_app(self.served, self._stores, door), Idle(self.served.metrics.refused))
        self._server = _Server(config, door, drain_s, hung_up)
        self._server.on_hang_up = self.renew_tenants
        self._principals = principals
        self._read_tenants = read_tenants
        self._renewing = threading.Lock()

    def run(self, taken: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `stop`, or until SIGINT or SIGTERM where this is the main thread. Calls `on_ready` once it answers."""
        if self.served.guides is not None:
            self.served.guides.prepare()  # before it listens: nothing else runs meanwhile
        self._server.on_ready = on_ready
        self._server.on_patience_lost = self._loop.abort_all
        if self._events is not None:
            self._events.start()
        self._loop.start()
        try:
            self._stores.start()
            self._server.run(sockets=[taken])
        finally:
            log.info("closing: backups and copies end, then the store is closed")
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

    def renew_tenants(self) -> None:
        """Reads the tenants again. If the file is not valid, the tenants stay as they were, and the log says why. Any thread."""
        if self._read_tenants is None:
            log.info("SIGHUP: this server has no --tenants file, so there is nothing to read again")
            return
        with self._renewing:  # what was read last counts last
            try:
                change = self._principals.replace(self._read_tenants())
            except ConfigError as error:
                log.error("the tenants stay as they were: %s", error)
            else:
                self.served.metrics.begin_at_zero(self._principals.names)
                log.info("tenants were read again", extra={"fields": change._asdict()})

    def _after_step(self, deltas: Sequence[Delta]) -> None:
        self._progress.after_step()
        self._load.after_step()
        self._history.after_step()
        self._throughput.after_step()
        if self._events is not None:
            self._events.take()

    def stop(self) -> None:
        """Ends `run` once running answers have finished, or had their time. From any thread; a second call ends them at once."""
        self._server.stop()


def _config(app: FastAPI, idle: Idle) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", idle.protocol),  # any callable that makes one will do
        log_config=None,  # it says what it has to say in the same log
        log_level="warning",
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_CALL_S,
    )


class _Server(uvicorn.Server):
    """Says when it listens. Stops once nobody is inside any more, or those who are have had their time."""

    on_ready: Callable[[], None]
    on_patience_lost: Callable[[], None]
    on_hang_up: Callable[[], None]

    def __init__(self, config: uvicorn.Config, door: Door, drain_s: float, hung_up: Callable[[], bool]) -> None:
        super().__init__(config)
        self._hung_up = hung_up
        self._door = door
        self._drain_s = drain_s
        self._at_once = False
        self._said = False  # in the log, that it stops

    def stop(self) -> None:
        self._at_once = self._door.closed_at_s is not None
        self._door.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At SIGINT and SIGTERM. Signals are not raised again afterwards: the engine is still to be closed."""
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._hung_up():
            asyncio.get_running_loop().run_in_executor(None, self.on_hang_up)  # files may be slow
        if self._door.closed_at_s is not None and not self._said:  # not in `stop`: a signal may come in the middle of a line
            self._said = True
            log.info("stopping: %d request(s) may finish for %g s", self._door.num_inside, self._drain_s)
        patient = not self._at_once and self._door.closed_for_s() < self._drain_s
        if self._door.closed_at_s is not None and not (self._door.num_inside and patient):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers that are still not whole are ended in order, not cut off."""
        if self._door.num_inside:
            log.info("ending %d request(s) that have not finished", self._door.num_inside)
            self.on_patience_lost()
        await super().shutdown(sockets=sockets)
