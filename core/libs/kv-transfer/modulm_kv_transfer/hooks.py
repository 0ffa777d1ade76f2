"""Checks the flags of KV connectors before a model is loaded."""

from __future__ import annotations

from typing import Any

from modulm.errors import ConfigError
from modulm.plugins import hookimpl, manager
from modulm_kv_transfer.choice import connector_tables
from modulm_kv_transfer.flags import ECTransferConfig, KVTransferConfig
from modulm_kv_transfer.remote import RemoteConnector

__all__ = ["modulm_config_final"]


@hookimpl
def modulm_config_final(config: Any) -> None:
    """Raise an error for a connector that is not installed, or for unknown options."""
    if config.group(ECTransferConfig).ec_transfer_config:
        from modulm_kv_transfer.encoder_choice import encoder_connector

        encoder_connector(config, manager.current())
    connector = manager.current().configured("kv_connectors", connector_tables(config))
    late = config.group(KVTransferConfig).kv_offloading_policy != "all"
    if late and (connector is None or issubclass(connector[0], RemoteConnector)):
        raise ConfigError(
            "kv_offloading_policy",
            "evicted is for stores of one engine: set --kv-offloading-size or a store with "
            "--kv-transfer-config",
        )
    if connector is not None and config.cache.prefix_caching_hash_algo == "builtin":
        raise ConfigError(
            "prefix_caching_hash_algo", "builtin hashes blocks differently in each process; a KV "
            "connector needs sha256 or xxhash"
        )  # fmt: skip
