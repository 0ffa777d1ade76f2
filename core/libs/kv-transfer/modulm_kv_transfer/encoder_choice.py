"""Finds the store of encoder outputs that `--ec-transfer-config` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.errors import ConfigError
from modulm_kv_transfer.encoder_outputs import EncoderConnector, EncoderOutputs, EncoderTransfer
from modulm_kv_transfer.flags import ECTransferConfig
from modulm_kv_transfer.identity import encoder_facts, facts_digest

__all__ = ["EC_CONNECTORS", "encoder_connector", "open_encoder_outputs"]

_FLAG = "ec_transfer_config"
#: vLLM's connector names -> the corresponding drivers.
EC_CONNECTORS: Mapping[str, str] = {
    "ECExampleConnector": "disk",
    "ECSharedStorageConnector": "disk",
}
#: vLLM's connectors that have no driver -> what to use.
_OTHERS: Mapping[str, str] = {
    "ECCPUConnector": "disk shares a folder, which may be in memory (/dev/shm)",
    "ECMooncakeConnector": "peer fetches outputs from other engines",
}


def encoder_connector(config: Any, plugins: Any) -> EncoderConnector | None:
    """Return the connector that the flag names, or None. Raises ConfigError."""
    table = config.group(ECTransferConfig).ec_transfer_config
    if not table:
        return None
    name = EC_CONNECTORS.get(table["ec_connector"], table["ec_connector"])
    installed = {declared.name for declared in plugins.names("kv_connectors")}
    if name not in installed:
        known = ", ".join(sorted({*EC_CONNECTORS, *installed}))
        message = f"ec_connector: {name!r} is not one of {known}"
        if name in _OTHERS:
            message = f"ec_connector: {name} is not supported: {_OTHERS[name]}"
        raise ConfigError(_FLAG, message)
    driver = plugins.load("kv_connectors", name)
    if not issubclass(driver, EncoderConnector):
        raise ConfigError(
            _FLAG, f"ec_connector: {name} stores no encoder outputs: use disk or peer"
        )
    options = plugins.options("kv_connectors", name, table.get("ec_connector_extra_config", {}))
    connector: EncoderConnector = driver(options)
    return connector


def open_encoder_outputs(
    config: Any, plugins: Any
) -> tuple[EncoderOutputs, EncoderTransfer] | None:
    """Return the store that the flag names, and what it is for; None without the flag.

    Raises ConfigError, CheckpointError.
    """
    connector = encoder_connector(config, plugins)
    if connector is None:
        return None
    table = config.group(ECTransferConfig).ec_transfer_config
    facts, role = encoder_facts(config, plugins), table["ec_role"]
    transfer = EncoderTransfer(
        facts_digest(facts), facts,
        produces=role != "ec_consumer", consumes=role != "ec_producer",
        replica=config.parallel.data_parallel_rank_local,
        host=table.get("ec_ip", "127.0.0.1"), port=table.get("ec_port", 14579),
    )  # fmt: skip
    return connector.encoder_outputs(transfer), transfer
