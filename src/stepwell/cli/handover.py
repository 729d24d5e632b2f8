"""Options of `stepwell serve` for separate prefill and decode servers. Heavy imports on use."""

from __future__ import annotations

from argparse import Namespace
from argparse import _ArgumentGroup as ArgumentGroup
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stepwell.base.config import WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.policy.write_choice import AUTO

if TYPE_CHECKING:
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.engine import Engine
    from stepwell.server.ahead import PartSender
    from stepwell.server.handover import Offers, Peers
    from stepwell.store.peer.lane import SharedHost

PEER_TOKEN = "STEPWELL_PEER_TOKEN"
PREFILL, DECODE = "prefill", "decode"
_ANY = ("0.0.0.0", "::", "[::]", "")
_ALWAYS_FETCH = 1.0  # assumed tokens per second of computing, so that fetching always wins


def configure(group: ArgumentGroup) -> None:
    group.add_argument(
        "--role", choices=(PREFILL, DECODE),
        help="prefill: compute prompts for other servers; decode: generate from prompts that others computed",
    )  # fmt: skip
    group.add_argument(
        "--peer", action="append", default=[], metavar="HOST:PORT",
        help="with --role decode: a prefill server; with --role prefill: a decode server that receives parts of a prompt while"
        " the rest is computed; repeatable",
    )  # fmt: skip
    group.add_argument("--peer-token", metavar="TOKEN", help=f"shared secret of these servers; safer in {PEER_TOKEN}")
    group.add_argument(
        "--transfer-host", metavar="HOST",
        help="this machine's address for other transfer engines; the engine listens on all interfaces (default: --host)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The checked options."""

    role: str
    token: str
    peers: tuple[tuple[str, int], ...]
    memory: SharedHost
    host: str
    transfer_host: str

    def with_shared_memory(self, config: EngineConfig) -> EngineConfig:
        """Settings with a host tier in shared memory."""
        return replace(config, host_block=self.memory.make, write=config.write or WritePolicy.THROUGH)

    def offers(self, config: EngineConfig, port: int) -> Offers | None:
        """The started offers of a prefill server; None on a decode server. Raises StoreError."""
        if self.role != PREFILL:
            return None
        from stepwell.server.handover import Offers
        from stepwell.store.peer.lane import Wire

        wire = Wire(host=self.transfer_host)
        offers = Offers(self.memory, wire, host=self.host, port=port, token=self.token, key=config.store_config.key)
        offers.start()
        return offers

    def ahead(self, offers: Offers | None) -> PartSender | None:
        """The sender of parts of a prefill server; None without --peer."""
        if offers is None or not self.peers:
            return None
        from stepwell.server.ahead import PartSender

        return PartSender(offers, self.peers, self.token)

    def peers_of(self, engine: Engine, config: EngineConfig) -> Peers | None:
        """The peers of a decode server, with their store attached below the engine's host tier; None on a prefill server."""
        if self.role != DECODE:
            return None
        from stepwell.server.handover import Peers
        from stepwell.store.peer.lane import Lane, Wire
        from stepwell.store.peer.store import PeerStore

        wire = Wire(host=self.transfer_host)
        store = PeerStore(self.memory, partial(Lane, self.memory, wire), clock=engine.clock)
        engine.cache.store.attach(store, replace(config.store_config, recompute_tokens_per_s=_ALWAYS_FETCH))
        engine.stores.append(store)
        return Peers(store, self.peers, self.token)

    def summary(self) -> list[tuple[str, str]]:
        named = ", ".join(f"{host}:{port}" for host, port in self.peers)
        asks = f", reads from {named}" if self.role == DECODE else f", sends ahead to {named}" if named else ""
        return [
            ("role", self.role + asks),
            ("warning", "transfer engines listen on all interfaces without authentication: keep them on a private network"),
        ]


def read(args: Namespace, environment: Mapping[str, str]) -> Handover | None:
    """The checked options; None without a role. Raises ConfigError."""
    if args.role is None:
        if args.peer or args.peer_token:
            raise ConfigError("--peer and --peer-token need --role")
        return None
    token = args.peer_token or environment.get(PEER_TOKEN) or ""
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"--role needs a peer token of 16 characters or more, the same on both servers: set {PEER_TOKEN}")
    if args.role == DECODE and not args.peer:
        raise ConfigError("--role decode needs the address of a prefill server: --peer HOST:PORT")
    if args.role == DECODE and args.store is not None:
        raise ConfigError("--role decode reads from prefill servers only: leave --store out")
    if args.role == PREFILL and args.write_policy != AUTO and not WritePolicy(args.write_policy).saves_on_commit:
        raise ConfigError("--role prefill hands out what is on the host: it needs --write-policy through")
    host = args.transfer_host or args.host
    if host in _ANY:
        raise ConfigError(f"other servers cannot reach this one as {host}: give its address with --transfer-host")
    from stepwell.store.peer.lane import SharedHost

    return Handover(
        role=args.role,
        token=token,
        peers=tuple(_address(each) for each in args.peer),
        memory=SharedHost(),
        host=host,
        transfer_host=host,
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--peer must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
