"""A connected Mooncake client: the calls that we use, under our names. The one file that imports the wheel, on first use.

Every answer is a code; codes that mean that the master cannot be reached become StoreError here, so that health checks see the
store fail as a whole. Measured with 0.3.13 after the master died: the first `exist` fails at once, every other call blocks for
4.3 to 4.5 s before it fails. Mooncake finds a restarted master by itself within about a second.

To call a client whose set-up failed, or that was closed, ends the process: nothing here permits that. All calls release the
GIL and may be made from several threads.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from stepwell.base.errors import ConfigError, StoreError
from stepwell.store.mooncake.config import MooncakeConfig, SoftPin

OK = 0
NO_SPACE = -200  # nothing can be evicted, or nothing yet
BAD_REQUEST = -600  # also: the buffer is smaller than the value
NOT_READY = -703  # another client is writing it
NOT_FOUND = -704
ALREADY_THERE = -705
TRANSFER_FAILED = -800  # also: the buffer is larger than the value
OVER_QUOTA = -1700  # of the tenant, where the master has quotas
_RPC_CODES = range(-999, -899)  # the master, or the connection to it, is gone

Terms = Callable[[list[str], bool], object]  # group of each value, whether to pin them -> the wheel's ReplicateConfig


class Client:
    """Mooncake's client after a successful set-up. Values are named by text and lie in registered memory."""

    def __init__(self, raw: Any, terms: Terms, *, address: str) -> None:
        self._raw = raw
        self._terms = terms
        self._address = address

    def exist(self, names: list[str]) -> list[int]:
        """1 for a value that exists, 0 for one that does not, else a code. Renews the lease of existing values."""
        return self._heard(self._raw.batch_is_exist(names))

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Fills the slices of each value; returns the number of bytes, or a code."""
        return self._heard(self._raw.batch_get_into_multi_buffers(names, pointers, sizes))

    def put(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]], groups: list[str], *, pinned: bool
    ) -> list[int]:
        """Stores each value, the slices one after the other. Also returns OK if a value existed, and leaves that value unchanged.

        With `pinned` the values are softly pinned: for a while they are evicted last.
        """
        return self._heard(self._raw.batch_put_from_multi_buffers(names, pointers, sizes, self._terms(groups, pinned)))

    def remove(self, names: list[str]) -> list[int]:
        """Removes values at once, leased or not: OK, NOT_FOUND or another code."""
        return self._heard(self._raw.batch_remove(names, True))

    def remove_all(self, start: str) -> int:
        """Removes all values with this prefix (letters, digits and dashes) at once: their number, or a code."""
        assert start.replace("-", "").isalnum(), f"{start!r} is more than a prefix"
        return self._heard([self._raw.remove_by_regex(f"^{start}", True)])[0]

    def size(self, name: str) -> int:
        """Bytes of a value, or a code."""
        return self._heard([self._raw.get_size(name)])[0]

    def register(self, address: int, size_bytes: int) -> None:
        """Permits Mooncake to access this memory, which must not move until `unregister`."""
        code = self._raw.register_buffer(address, size_bytes)
        if code != OK:
            raise StoreError(
                f"Mooncake cannot register {size_bytes} bytes of memory (code {code}): check the limit on locked memory "
                f"(ulimit -l), and whether the same memory is registered twice"
            )

    def unregister(self, address: int) -> None:
        self._raw.unregister_buffer(address)

    def close(self) -> None:
        """Leaves the cluster. Takes up to 1 s, or 2 s for a client that contributes memory; the wheel holds the GIL meanwhile."""
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
            f"cannot join the Mooncake cluster of {config.master_server_address} (code {code}): check local_hostname "
            f"({config.local_hostname}: the other clients must reach it, and it needs an interface besides lo), metadata_server "
            f"({config.metadata_server}), protocol ({config.protocol}) and global_segment_size ({config.global_segment_size})"
        )
    return Client(raw, _terms(config, wheel), address=config.master_server_address)


def load_wheel() -> Any:
    """Mooncake's own module. Raises ConfigError if it is missing or does not load."""
    try:
        return import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the Mooncake store needs a wheel: install mooncake-transfer-engine-non-cuda (this is what stepwell[mooncake] does) "
            "or, with CUDA, mooncake-transfer-engine"
        ) from error
    except ImportError as error:
        raise ConfigError(f"Mooncake's wheel does not load ({error}); on Debian it needs the package libibverbs1") from error


def knock(config: MooncakeConfig) -> None:
    """Fails within seconds if there is no master at its address: the wheel would try for a minute and a half."""
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
