"""Mooncake's configuration: its own file and variables mean what they mean to Mooncake, and mistakes are named."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.base.errors import ConfigError, StoreError
from stepwell.cli.engine_options import mooncake_options
from stepwell.store.mooncake.client import connect
from stepwell.store.mooncake.config import P2P, MooncakeConfig, SoftPin, from_file, from_mapping
from stepwell.store.mooncake.opening import config_of, open_mooncake
from stepwell.store.registry import Opening, open_store

MASTER = "10.0.0.1:50051"
MOONCAKES_OWN_FILE = {
    "local_hostname": "node1",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": "4gb",
    "local_buffer_size": 1073741824,
    "protocol": "RDMA",
    "device_name": "mlx5_0",
    "master_server_address": MASTER,
    "enable_ssd_offload": True,
    "ssd_offload_path": "/nvme",
    "tenant_id": "alice",
    "enable_client_http_server": "false",
    "client_http_port": 9300,
}


def read(**settings: Any) -> MooncakeConfig:
    return from_mapping({"master_server_address": MASTER, **settings}, origin="a test")


def test_the_file_of_other_mooncake_clients_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(MOONCAKES_OWN_FILE))
    config = from_file(path)
    assert (config.local_hostname, config.protocol, config.device_name, config.tenant_id) == ("node1", "rdma", "mlx5_0", "alice")
    assert config.global_segment_size == 4 * 2**30 and config.local_buffer_size == 2**30
    assert config.enable_ssd_offload and config.ssd_offload_path == "/nvme" and not config.enable_client_http_server


def test_the_master_is_all_that_must_be_given() -> None:
    config = read()
    assert config.metadata_server == P2P and config.protocol == "tcp" and config.replica_num == 1
    assert config.soft_pin is SoftPin.PRESERVE and config.soft_pin_ttl_ms is None
    with pytest.raises(ConfigError, match="has no master_server_address"):
        from_mapping({}, origin="a test")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4gb", 4 * 2**30), ("4 GB", 4 * 2**30), ("1.5g", 3 * 2**29), ("512m", 2**29), ("2GiB", 2**31), ("4096", 4096), (0, 0)],
)
def test_sizes_count_in_1024s_as_mooncake_does(text: str | int, size: int) -> None:
    assert read(global_segment_size=text).global_segment_size == size


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"masterr": "x", "protocols": "y"}, "masterr, protocols"),
        ({"global_segment_size": "much"}, "global_segment_size: not an amount"),
        ({"global_segment_size": -1}, "global_segment_size"),
        ({"global_segment_size": None}, "global_segment_size"),
        ({"replica_num": 0}, "replica_num"),
        ({"replica_num": "two"}, "replica_num must be a whole number"),
        ({"replica_num": True}, "replica_num"),
        ({"soft_pin": "maybe"}, "preserve, enable, disable"),
        ({"soft_pin_ttl_ms": 1000}, "soft_pin=enable"),
        ({"staging_bytes": "1kb"}, "staging_bytes must be"),
        ({"protocol": ""}, "protocol"),
        ({"protocol": 7}, "protocol must be a text"),
        ({"local_hostname": None}, "local_hostname"),
        ({"enable_ssd_offload": "perhaps"}, "true or false"),
        ({"connect_timeout_s": "soon"}, "seconds"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"connect_timeout_s": "nan"}, "connect_timeout_s"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(**settings)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken, listed = tmp_path / "broken.json", tmp_path / "listed.json"
    broken.write_text("{")
    listed.write_text("[]")
    for path, complaint in ((tmp_path / "none.json", "No such file"), (broken, "not JSON"), (listed, "JSON object")):
        with pytest.raises(ConfigError, match=complaint):
            from_file(path)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(MOONCAKES_OWN_FILE))
    options = {"soft_pin": "enable", "soft_pin_ttl_ms": "60000", "replica_num": "2", "protocol": "tcp"}
    config = config_of(Opening(location=str(path), options=options))
    assert (config.soft_pin, config.soft_pin_ttl_ms, config.replica_num, config.protocol) == (SoftPin.ENABLE, 60_000, 2, "tcp")
    assert config.master_server_address == MASTER
    with pytest.raises(ConfigError, match="give one of them"):
        config_of(Opening(location=str(path), options={"config_path": "other.json"}))
    with pytest.raises(ConfigError, match="unknown store option"):
        config_of(Opening(location=str(path), options={"color": "blue"}))


def test_the_usual_variables_are_options() -> None:
    environment = {
        "MOONCAKE_MASTER": MASTER,
        "MOONCAKE_TE_META_DATA_SERVER": "http://10.0.0.1:8080/metadata",
        "MOONCAKE_PROTOCOL": "rdma",
        "MOONCAKE_DEVICE": "mlx5_0,mlx5_1",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16gb",
        "MOONCAKE_LOCAL_HOSTNAME": "node2",
        "MOONCAKE_TENANT_ID": "bob",
        "HOME": "/root",
    }
    config = config_of(Opening(options=mooncake_options(environment)))
    assert config == read(
        metadata_server="http://10.0.0.1:8080/metadata", protocol="rdma", device_name="mlx5_0,mlx5_1",
        global_segment_size=16 * 2**30, local_hostname="node2", tenant_id="bob",
    )  # fmt: skip


def test_a_file_named_by_the_environment_silences_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(MOONCAKES_OWN_FILE))
    options = mooncake_options({"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_PROTOCOL": "tcp"})
    assert config_of(Opening(options=options)).protocol == "rdma"


def test_without_the_wheel_both_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"mooncake-transfer-engine-non-cuda.* mooncake-transfer-engine"):
        open_store("mooncake:", options={"master_server_address": MASTER})


def test_a_master_that_is_not_there_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", sys)  # never asked for anything
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(StoreError, match=f"no Mooncake master at 127.0.0.1:{port}"):
            open_mooncake(Opening(options={"master_server_address": f"127.0.0.1:{port}"}))


def test_an_address_without_a_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", sys)
    with pytest.raises(ConfigError, match="host:port"):
        connect(read(master_server_address="somewhere"))
