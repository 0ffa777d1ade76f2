"""Finds the connector that flags and tables name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.connector import KVConnector
from modulm.contracts.decision import Decision
from modulm.errors import ConfigError
from modulm_kv_transfer.flags import KVTransferConfig

__all__ = ["CONNECTORS", "connector_decision", "connector_tables", "driver_name"]

#: vLLM's connector names -> the corresponding drivers.
CONNECTORS: Mapping[str, str] = {
    "OffloadingConnector": "host",
    "MultiConnector": "multi",
    "ExampleConnector": "disk",
    "NixlConnector": "peer",
    "NixlPullConnector": "peer",
    "SharedStorageConnector": "disk",
    "SimpleCPUOffloadConnector": "host",
}
_TIERS = "MultiConnector keeps blocks in host memory and files"
_SHARED = "ExampleConnector shares a folder, MultiConnector puts host memory before it"
_BETWEEN = "NixlConnector moves blocks between engines"
#: vLLM's connectors that have no driver -> what to use.
_OTHERS: Mapping[str, str] = {
    "LMCacheConnectorV1": _TIERS,
    "LMCacheMPConnector": _TIERS,
    "FlexKVConnectorV1": _TIERS,
    "HF3FSKVConnector": _SHARED,
    "MooncakeStoreConnector": _SHARED,
    "MooncakeConnector": _BETWEEN,
    "MoRIIOConnector": _BETWEEN,
    "NixlPushConnector": f"{_BETWEEN}; consumers fetch them",
    "HiSparseConnector": "OffloadingConnector keeps blocks in host memory",
    "DecodeBenchConnector": "bench/disaggregated.py measures decoding with real blocks",
    "ExampleHiddenStatesConnector": "a KV connector stores keys, values and states only",
}


def connector_tables(config: Any) -> Mapping[str, Any]:
    """Return the tables of `--plugin-config` with the connector that the flags name.

    Raises ConfigError if two flags name a connector, or for an unknown name.
    """
    tables: Mapping[str, Any] = config.device.plugin_config
    flags = config.group(KVTransferConfig)
    named: dict[str, Mapping[str, Any]] = dict(tables.get("kv_connectors") or {})
    sources = ["plugin_config"] if named else []
    if flags.kv_offloading_size:
        sources.append("kv_offloading_size")
        driver = {"native": "host"}[flags.kv_offloading_backend]
        named[driver] = {"cpu_bytes_to_use": int(flags.kv_offloading_size * (1 << 30))}
    if flags.kv_transfer_config:
        sources.append("kv_transfer_config")
        table = flags.kv_transfer_config
        own = {key: table[key] for key in ("engine_id", "kv_ip", "kv_port") if key in table}
        if table.get("kv_role", "kv_both") != "kv_both":
            own["kv_role"] = table["kv_role"]
        named[driver_name(table["kv_connector"])] = {
            **table.get("kv_connector_extra_config", {}), **own,
        }  # fmt: skip
    if len(sources) > 1:
        raise ConfigError(
            sources[-1], f"{sources[0]} names a KV connector as well: set only one of them"
        )
    return {**tables, "kv_connectors": named} if named else tables


def connector_decision(config: Any, connector: KVConnector) -> Decision:
    """Return the choice of the connector: the flag that names it, and options that it was given."""
    flags = config.group(KVTransferConfig)
    options = connector_tables(config)["kv_connectors"].get(connector.name) or {}
    set_by = "set by --plugin-config"
    if flags.kv_offloading_size:
        set_by = "set by --kv-offloading-size"
    elif flags.kv_transfer_config:
        set_by = "set by --kv-transfer-config"
    described = ", ".join(
        f"{key} {value}" for key, value in sorted(options.items()) if key != "secret_file"
    )
    return Decision("KV connector", (), connector.name, f"{set_by}; {described or 'defaults'}")


def driver_name(name: str) -> str:
    """Return the driver of a connector name. Raises ConfigError listing the valid names."""
    from modulm.plugins import manager

    installed = {declared.name for declared in manager.current().names("kv_connectors")}
    if name in CONNECTORS or name in installed:
        return CONNECTORS.get(name, name)
    known = ", ".join(sorted({*CONNECTORS, *installed}))
    message = f"kv_connector: {name!r} is not one of {known}"
    if name in _OTHERS:
        message = f"kv_connector: {name} is not supported: {_OTHERS[name]}"
    raise ConfigError("kv_transfer_config", message)
