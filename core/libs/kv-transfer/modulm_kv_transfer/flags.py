"""Flags of KV connectors, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group, read_mapping, suggest
from modulm.errors import ConfigError

__all__ = ["ECTransferConfig", "KVTransferConfig"]

_KEYS = (
    "kv_connector", "kv_role", "kv_connector_extra_config", "engine_id", "kv_ip", "kv_port",
)  # fmt: skip
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
#: vLLM's keys that are not supported -> why.
_OTHERS: Mapping[str, str] = {
    "kv_buffer_device": "blocks that wait to be fetched are in host memory",
    "kv_buffer_size": "cpu_bytes_to_use in kv_connector_extra_config is the memory of a producer",
    "kv_rank": "requests say where their blocks are",
    "kv_parallel_size": "requests say where their blocks are",
    "kv_connector_module_path": "a connector is an installed package (modulm.kv_connectors)",
    "enable_permute_local_kv": "both engines need the same layout of the cache",
}
_FAILURE = "kv_load_failure_policy"


def _transfer(value: Any) -> Mapping[str, Any]:
    """Read vLLM's KVTransferConfig. Raises ConfigError for an unknown key or role."""
    table = read_mapping("kv_transfer_config", value)
    for key in table:
        if key in _OTHERS:
            message = f"{key} is not supported: {_OTHERS[key]}; leave it out"
            raise ConfigError("kv_transfer_config", message)
        if key not in (*_KEYS, _FAILURE):
            known = ", ".join(_KEYS)
            message = f"{key} is not one of {known}{suggest(key, _KEYS)}"
            raise ConfigError("kv_transfer_config", message)
    if table.get(_FAILURE, "recompute") != "recompute":
        message = f"{_FAILURE}: {table[_FAILURE]!r} is not supported: use recompute"
        raise ConfigError("kv_transfer_config", message)
    if table and not isinstance(table.get("kv_connector"), str):
        raise ConfigError("kv_transfer_config", "kv_connector: must be the name of a connector")
    if table.get("kv_role", "kv_both") not in _ROLES:
        message = f"kv_role: {table['kv_role']!r} is not one of {', '.join(_ROLES)}"
        raise ConfigError("kv_transfer_config", message)
    if not isinstance(table.get("kv_connector_extra_config", {}), Mapping):
        message = "kv_connector_extra_config: must be a table of options"
        raise ConfigError("kv_transfer_config", message)
    return table


_EC_KEYS = ("ec_connector", "ec_role", "ec_connector_extra_config", "engine_id", "ec_ip", "ec_port")
#: Keys of vLLM that say nothing here: outputs stay in host memory and files.
_EC_IGNORED = ("ec_buffer_device", "ec_buffer_size", "ec_rank", "ec_parallel_size")
_EC_ROLES = ("ec_both", "ec_producer", "ec_consumer")


def _encoder_transfer(value: Any) -> Mapping[str, Any]:
    """Read vLLM's ECTransferConfig. Raises ConfigError for an unknown key or role."""
    name = "ec_transfer_config"
    table = read_mapping(name, value)
    for key in table:
        if key in _EC_IGNORED:
            message = f"{key} is not supported: outputs are stored in files; leave it out"
            raise ConfigError(name, message)
        if key not in _EC_KEYS:
            known = ", ".join(_EC_KEYS)
            raise ConfigError(name, f"{key} is not one of {known}{suggest(key, _EC_KEYS)}")
    if not table:
        return table
    if not isinstance(table.get("ec_connector"), str):
        raise ConfigError(name, "ec_connector: must be the name of a connector")
    if table.get("ec_role") not in _EC_ROLES:
        message = f"ec_role: {table.get('ec_role')!r} is not one of {', '.join(_EC_ROLES)}"
        raise ConfigError(name, message)
    if not isinstance(table.get("ec_connector_extra_config", {}), Mapping):
        raise ConfigError(name, "ec_connector_extra_config: must be a table of options")
    if not isinstance(table.get("ec_ip", ""), str):
        raise ConfigError(name, "ec_ip: must be an address")
    port = table.get("ec_port", 1)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
        raise ConfigError(name, "ec_port: must be a port")
    return table


@flag_group
class ECTransferConfig(FlagGroup):
    """Outputs of media encoders outside the engine."""

    title = "ECTransferConfig"

    ec_transfer_config: Mapping[str, Any] = flag(
        {},
        "Store of encoder outputs, in vLLM's format: ec_connector (vLLM's name of it, or an "
        "installed driver), ec_role (ec_producer, ec_consumer or ec_both), "
        "ec_connector_extra_config (its options), ec_ip and ec_port.",
        parse=_encoder_transfer,
    )


@flag_group
class KVTransferConfig(FlagGroup):
    """KV cache blocks outside the device: offloading and KV connectors."""

    title = "KVTransferConfig"

    kv_offloading_size: float | None = flag(
        None,
        "Host memory for offloaded KV cache blocks, of all ranks together.",
        unit="GiB",
        least=0,
    )
    kv_offloading_backend: str = flag(
        "native", "Driver that offloads blocks; native: modulm-kv-host.", choices=("native",)
    )
    kv_offloading_policy: str = flag(
        "all",
        "Which blocks are saved: all full ones as soon as they are computed, or evicted: those "
        "that will soon be evicted from the device.",
        choices=("all", "evicted"),
    )
    kv_transfer_config: Mapping[str, Any] = flag(
        {},
        "KV connector, in vLLM's format: kv_connector (vLLM's name of it, or an installed "
        "driver), kv_connector_extra_config (its options), and for connectors between engines "
        "kv_role, engine_id, kv_ip and kv_port.",
        parse=_transfer,
    )
