"""Parse `--eplb-config`, which has vLLM's keys."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge

from modulm.errors import ConfigError
from modulm.structure import Problem, structure_table
from modulm_distributed.flags import DistributedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm.contracts.config import EngineConfig

__all__ = ["EplbConfig", "balance_of", "eplb_config"]

log = logging.getLogger("modulm.engine")

_BETWEEN = "experts move between two steps"
#: Keys of vLLM that need not be set.
_NO_EFFECT = {
    "communicator": _BETWEEN,
    "enable_migration_batching": _BETWEEN,
    "use_async": _BETWEEN,
}


@frozen
class EplbConfig:
    """Settings of expert balancing.

    window_size: steps whose tokens are counted. step_interval: steps between two rebalances.
    num_redundant_experts: extra slots on all ranks together.
    """

    window_size: int = field(default=1000, validator=ge(1))
    step_interval: int = field(default=3000, validator=ge(1))
    num_redundant_experts: int = field(default=0, validator=ge(0))
    log_balancedness: bool = False


def eplb_config(table: Mapping[str, Any]) -> EplbConfig:
    """Parse the configuration. Raises ConfigError, which names the key."""
    for key in [key for key in table if key in _NO_EFFECT]:
        log.info("--eplb-config.%s has no effect: %s", key, _NO_EFFECT[key])
    try:
        return structure_table(
            {key: value for key, value in table.items() if key not in _NO_EFFECT}, EplbConfig
        )
    except Problem as problem:
        raise ConfigError("eplb_config", str(problem)) from problem


def balance_of(config: EngineConfig) -> EplbConfig | None:
    """Return the configuration, or None if experts are not balanced."""
    flags = config.group(DistributedConfig)
    return eplb_config(flags.eplb_config) if flags.enable_eplb else None
