"""A connected Mooncake client: the calls we use, in our words. The one file that imports the wheel, on first use.

Every answer is a code; those that mean the master cannot be reached become StoreError here, so that whoever watches the
store sees it fail as a whole. Measured with 0.3.13 after the master died: the first `exist` fails at once, every other
call blocks 4.3 to 4.5 s before it does. A restarted master is found again within about a second, without our doing.

A client whose set-up failed, or that was closed, takes the process with it when it is called: nothing here lets that
happen. All calls give up the GIL and may be made from several threads.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from stepwell.base.errors import ConfigError, StoreError
from stepwell.store.mooncake.config import MooncakeConfig, SoftPin

OK = 0
NO_SPACE = -200  # nothing can be evicted, or not yet
BAD_REQUEST = -600  # also: the buffer is smaller than the value
NOT_READY = -703  # somebody is writing it
NOT_FOUND = -704
ALREADY_THERE = -705
TRANSFER_FAILED = -800  # also: the buffer is larger than the value
OVER_QUOTA = -1700  # of the tenant, where the master has quotas
_RPC_CODES = range(-999, -899)  # the master, or the way to it, is gone

Terms = Callable[[list[str], bool], object]  # group of each value, whether to pin them -> the wheel's ReplicateConfig


class Client:
    """Mooncake's client after a successful set-up. Values are named by text and lie in registered memory."""

    def __init__(self, raw: Any, terms: Terms, *, address: str) -> None:
        self._raw = raw
        self._terms = terms
        self._address = address

    def exist(self, names: list[str]) -> list[int]:
        """1 for a value that is there, 0 for one that is not, else a code. Renews the lease of those that are there."""
        return self._heard(self._raw.batch_is_exist(names))

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Fills the slices of each value; the number of bytes, or a code."""
        return self._heard(self._raw.batch_get_into_multi_buffers(names, pointers, sizes))

    def put(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]], groups: list[str], *, pinned: bool
    ) -> list[int]:
        """Keeps each value, the slices one after the other. Answers OK too where a value was there, and leaves that one.

        With `pinned` they are softly pinned: for a while they are evicted last.
        """
        return self._heard(self._raw.batch_put_from_multi_buffers(names, pointers, sizes, self._terms(groups, pinned)))

    def remove(self, names: list[str]) -> list[int]:
        """Removes values at once, leased or not: OK or NOT_FOUND or another code."""
        return self._heard(self._raw.batch_remove(names, True))

    def remove_all(self, start: str) -> int:
        """Removes at once all values whose names begin so (letters, digits and dashes): how many there were, or a code."""
        assert start.replace("-", "").isalnum(), f"{start!r} would be more than a beginning"
        return self._heard([self._raw.remove_by_regex(f"^{start}", True)])[0]

    def size(self, name: str) -> int:
        """Bytes of a value, or a code."""
        return self._heard([self._raw.get_size(name)])[0]

    def register(self, address: int, size_bytes: int) -> None:
        """Lets Mooncake move data in and out of this memory, which must stay where it is until `unregister`."""
        code = self._raw.register_buffer(address, size_bytes)
        if code != OK:
            raise StoreError(
                f"Mooncake cannot register {size_bytes} bytes of memory (code {code}): look at the limit on locked memory "
                f"(ulimit -l), and whether the same memory is registered twice"
            )

    def unregister(self, address: int) -> None:
        self._raw.unregister_buffer(address)

    def close(self) -> None:
        """Leaves the cluster. Takes up to 1 s, 2 s for a client that lent memory, and the wheel keeps the GIL meanwhile."""
        self._raw.close()

    def _heard(self, codes: list[int]) -> list[int]:
        lost = next((code for code in codes if code in _RPC_CODES), None)
        if lost is not None:
            raise StoreError(
                f"the Mooncake master at {self._address} does not answer (code {lost}): is it running, is it reachable?"
            )
        return codes


def connect(config: MooncakeConfig) -> Client:
    """Joins the cluster. Raises ConfigError without the wheel, StoreError when the master cannot be reached."""
    wheel = load_wheel()
    knock(config)
    raw = wheel.MooncakeDistributedStore()
    code = raw.setup(
        config.local_hostname, config.metadata_server, config.global_segment_size, config.local_buffer_size,
        config.protocol, config.device_name, config.master_server_address,
        enable_ssd_offload=config.enable_ssd_offload, ssd_offload_path=config.ssd_offload_path, tenant_id=config.tenant_id,
        enable_client_http_server=config.enable_client_http_server, client_http_port=config.client_http_port,
    )  # fmt: skip
    if code != OK:
        raise StoreError(
            f"cannot join the Mooncake cluster of {config.master_server_address} (code {code}): look at local_hostname "
            f"({config.local_hostname}: the other clients must reach it, and it needs an interface besides lo), metadata_server "
            f"({config.metadata_server}), protocol ({config.protocol}) and global_segment_size ({config.global_segment_size})"
        )
    return Client(raw, _terms(config, wheel), address=config.master_server_address)


def load_wheel() -> Any:
    """Mooncake's own module. Raises ConfigError where it is missing or does not load."""
    try:
        return import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the Mooncake store needs a wheel: install mooncake-transfer-engine-non-cuda (this is what stepwell[mooncake] does) "
            "or, beside CUDA, mooncake-transfer-engine"
        ) from error
    except ImportError as error:
        raise ConfigError(f"Mooncake's wheel does not load ({error}); on Debian it needs the package libibverbs1") from error


def knock(config: MooncakeConfig) -> None:
    """Fails soon when nobody is at the master's address: the wheel would try for a minute and a half."""
    address = config.master_server_address
    if "://" in address:
        return  # found through a directory of masters
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"master_server_address must be host:port, got {address!r:.80}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=config.connect_timeout_s).close()
    except OSError as error:
        raise StoreError(
            f"no Mooncake master at {address} ({error}): is mooncake_master running, is the address right?"
        ) from error


def _terms(config: MooncakeConfig, wheel: Any) -> Terms:
    def terms(groups: Sequence[str], pinned: bool) -> object:
        made = wheel.ReplicateConfig()
        made.replica_num = config.replica_num
        action = SoftPin.ENABLE if pinned and config.soft_pin is SoftPin.PRESERVE else config.soft_pin
        made.soft_pin_action = getattr(wheel.SoftPinAction, action.name)
        if config.soft_pin_ttl_ms is not None:
            made.soft_pin_ttl_ms = config.soft_pin_ttl_ms
        if any(groups):
            made.group_ids = list(groups)  # one for each value, empty for none
        return made

    return terms
