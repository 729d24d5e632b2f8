"""The `MOONCAKE_*` variables that Mooncake's own clients read, as options for `open_store("mooncake:", options=...)`.

Only translates names: what the values mean is said in `stepwell.store.mooncake.config`.
"""

from __future__ import annotations

from collections.abc import Mapping

_OPTIONS = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "local_buffer_size",
    "MOONCAKE_TENANT_ID": "tenant_id",
    "MOONCAKE_OFFLOAD_ENABLED": "enable_ssd_offload",
    "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "ssd_offload_path",
    "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "enable_client_http_server",
    "MOONCAKE_CLIENT_HTTP_PORT": "client_http_port",
}


def mooncake_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that the environment asks for. As with Mooncake itself, a file (MOONCAKE_CONFIG_PATH) silences the rest."""
    path = environment.get("MOONCAKE_CONFIG_PATH")
    if path:
        return {"config_path": path}
    return {option: environment[name] for name, option in _OPTIONS.items() if environment.get(name)}
