"""A Mooncake cluster as processes: a master, peers with stores of their own, and stores in this process.

For use inside a private network only. Everything started is killed when the cluster is left.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from demo_cluster.private_network import HOST
from processes import Peer, Process
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.store.registry import open_store
from waiting import wait_until

MASTER = "127.0.0.1:50051"
CLIENT_TTL_S = 3
LEASE_MS = 500
STAGING_BYTES = 6 * 2**20
PEER = Path(__file__).with_name("peer.py")


class Master(Process):
    """`mooncake_master`, listening on 127.0.0.1 when the constructor returns."""

    def __init__(self, directory: Path, flags: Sequence[str] = ()) -> None:
        host, port = MASTER.split(":")
        program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
        command = [
            program, f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_host={host}", "--metrics_port=9003",
            "--logtostderr=true", f"--default_kv_lease_ttl={LEASE_MS}", f"--client_ttl={CLIENT_TTL_S}",
            "--eviction_high_watermark_ratio=0.9", "--eviction_ratio=0.1", *flags,
        ]  # fmt: skip
        super().__init__(command, directory / "master.log", stdout=subprocess.DEVNULL)
        wait_until(lambda: self._process.poll() is not None or self._answers(host, int(port)), "a master", pause_s=0.02)
        assert self._process.poll() is None, f"no master:\n{self.said()}"

    @staticmethod
    def _answers(host: str, port: int) -> bool:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            return False
        return True


class Cluster:
    """`with Cluster(directory) as cluster:` has a master; the rest is asked for."""

    def __init__(self, directory: Path, flags: Sequence[str] = ()) -> None:
        self._directory = directory
        self._flags = flags
        self._stack = ExitStack()
        self._peers = 0

    def __enter__(self) -> Cluster:
        self.start_master()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def start_master(self) -> None:
        self.master = Master(self._directory, self._flags)
        self._stack.callback(self.master.kill)

    def options(self, **changes: str) -> dict[str, str]:
        """The options to open a store in this cluster with; it contributes no memory unless they say so."""
        usual = {"master_server_address": MASTER, "local_hostname": HOST, "global_segment_size": "0"}
        return {**usual, "staging_bytes": str(STAGING_BYTES), **changes}

    def open(self, **changes: str) -> MooncakeStore:
        """A store in this process, closed with the cluster."""
        store = open_store("mooncake:", options=self.options(**changes))
        assert isinstance(store, MooncakeStore)
        self._stack.callback(store.close)
        return store

    def start(self, script: Path = PEER, *arguments: str, **changes: str) -> Peer:
        """A script in a process of its own; by default one that obeys `peer.py`'s orders on a store of its own.

        Two of any kind are two calls: `left, right = (cluster.start(SCRIPT, name) for name in ("left", "right"))`.
        """
        self._peers += 1
        peer = Peer(script, self.options(**changes), arguments, self._directory / f"peer{self._peers}.log")
        self._stack.callback(peer.kill)
        return peer

    def lend(self, size: str) -> Peer:
        """A peer that contributes memory to the pool."""
        return self.start(global_segment_size=size)
