"""A process with a store of its own in the cluster, which follows orders. Run by `cluster.Cluster.start`.

{"do": "write", "space": "a", "names": ["x", "y"], "size": 1000, "group": "g"}     -> outcomes by name of the enum
{"do": "read", "space": "a", "names": ["x", "y"], "size": 1000}                    -> whether each came, verified
{"do": "contains", ...}, {"do": "delete", ...}, {"do": "close"}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from stepwell.store.api import Store
from stepwell.store.registry import open_store
from stepwell.testing.store_contract import fetch, key, offer, space

Order = dict[str, Any]


def write(store: Store, order: Order) -> list[str]:
    here = space(order["space"])
    group = order.get("group", "").encode()
    return [o.name for o in store.write_from(here, [offer(here, name, order["size"], group=group) for name in order["names"]])]


def read(store: Store, order: Order) -> list[bool]:
    return [fetch(store, space(order["space"]), name, order["size"]) is not None for name in order["names"]]


def contains(store: Store, order: Order) -> list[bool]:
    return store.contains(space(order["space"]), [key(name) for name in order["names"]])


def delete(store: Store, order: Order) -> int:
    return store.delete(space(order["space"]), [key(name) for name in order["names"]])


def close(store: Store, order: Order) -> None:
    store.close()


ORDERS: dict[str, Callable[[Store, Order], Any]] = {
    "write": write,
    "read": read,
    "contains": contains,
    "delete": delete,
    "close": close,
}


def answer(words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    opened = open_store("mooncake:", options=json.loads(sys.argv[1]))
    answer("ready")
    for line in sys.stdin:
        told = json.loads(line)
        answer(ORDERS[told["do"]](opened, told))
