"""Options of `stepwell serve` for publishing cache events. Imports ZeroMQ only if they are used."""

from __future__ import annotations

from argparse import Namespace
from argparse import _ArgumentGroup as ArgumentGroup
from typing import TYPE_CHECKING

from stepwell.base.errors import ConfigError

if TYPE_CHECKING:
    from stepwell.server.kv_events.zmq_socket import EventAddresses, ZmqEvents

_PUBLISH = "tcp://127.0.0.1:5557"


def configure(group: ArgumentGroup) -> None:
    group.add_argument(
        "--kv-events", nargs="?", const=_PUBLISH, metavar="ADDRESS",
        help=f"publish cache events for routers over ZeroMQ, in vLLM's format (without an address: {_PUBLISH})",
    )  # fmt: skip
    group.add_argument(
        "--kv-events-replay", metavar="ADDRESS", help="address at which routers request missed events, as in tcp://127.0.0.1:5558"
    )
    group.add_argument("--kv-events-topic", default="", metavar="TOPIC", help="topic of the events; some routers require one")


def open_socket(args: Namespace) -> ZmqEvents | None:
    """Binds the given addresses; None without any. Raises ConfigError."""
    addresses = _addresses(args)
    if addresses is None:
        return None
    from stepwell.server.kv_events.zmq_socket import ZmqEvents

    return ZmqEvents(addresses)


def summary(args: Namespace) -> list[tuple[str, str]]:
    """Lines for the start-up summary."""
    addresses = _addresses(args)
    if addresses is None:
        return []
    lines = [("KV events", addresses.publish + (f", replay at {addresses.replay}" if addresses.replay else ""))]
    if beyond := addresses.beyond_this_machine:
        lines.append(
            (
                "warning",
                f"every client that reaches {' or '.join(beyond)} can read prompts and salts: keep it on a private network",
            )
        )
    return lines


def _addresses(args: Namespace) -> EventAddresses | None:
    from stepwell.server.kv_events.zmq_socket import EventAddresses

    if args.kv_events is not None:
        return EventAddresses(publish=args.kv_events, replay=args.kv_events_replay, topic=args.kv_events_topic)
    if args.kv_events_replay is not None or args.kv_events_topic:
        raise ConfigError("--kv-events-replay and --kv-events-topic need --kv-events")
    return None
