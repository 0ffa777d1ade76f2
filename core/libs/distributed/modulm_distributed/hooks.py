"""Checks of the configuration for multiple ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.errors import ConfigError
from modulm.plugins import hookimpl
from modulm_distributed.eplb import eplb_config
from modulm_distributed.flags import DistributedConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_config_final"]


@hookimpl
def modulm_config_final(config: EngineConfig) -> None:
    """Raise ConfigError for impossible expert balancing, before a model is loaded."""
    flags = config.group(DistributedConfig)
    balance = eplb_config(flags.eplb_config)
    if not flags.enable_eplb:
        if flags.eplb_config:
            raise ConfigError("eplb_config", "has no effect without --enable-eplb")
        return
    parallel = config.parallel
    if parallel.shared_experts:
        message = "with experts of several replicas (--data-parallel-size): not supported yet"
        raise ConfigError("enable_eplb", message)
    if not parallel.enable_expert_parallel or parallel.tensor_parallel_size == 1:
        raise ConfigError(
            "enable_eplb",
            "requires experts on several ranks: set --enable-expert-parallel and "
            "--tensor-parallel-size",
        )
    if balance.num_redundant_experts % parallel.tensor_parallel_size:
        raise ConfigError(
            "eplb_config",
            f"num_redundant_experts: {balance.num_redundant_experts} cannot be divided evenly "
            f"over {parallel.tensor_parallel_size} ranks",
        )
