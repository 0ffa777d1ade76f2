"""Hooks that keep weights in host memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, UnsupportedError
from modulm.plugins import hookimpl
from modulm_weight_offload.flags import OffloadConfig
from modulm_weight_offload.planned import offloading_platform

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Platform

__all__ = ["modulm_config_final", "modulm_model_built", "modulm_model_loaded"]

log = logging.getLogger("modulm.weights")


@hookimpl
def modulm_config_final(config: Any) -> None:
    """Raise ConfigError for flags that contradict one another."""
    flags = config.group(OffloadConfig)
    flags.check()
    if flags.backend == "uva" and flags.offload_group_size:
        log.warning("--offload-backend uva: --offload-group-size has no effect")
    if flags.backend == "prefetch" and flags.cpu_offload_gb:
        log.warning("layers are copied (prefetch): --cpu-offload-gb has no effect")
    if flags.cpu_offload_experts and config.model.batch_invariant:
        raise ConfigError(
            "cpu_offload_experts",
            "experts change their places, and with it their rounding; not with --batch-invariant",
        )


@hookimpl
def modulm_model_built(
    model: Any, config: EngineConfig, fillers: list[Any], platform: Platform
) -> None:
    """Fill models whose weights partly stay in host memory."""
    flags = config.group(OffloadConfig)
    if not flags.is_used:
        return
    copies = offloading_platform(flags, platform).host_copies()
    from modulm_weight_offload.filling import Offloader

    fillers.append(Offloader(model, flags, platform, copies).fill)


@hookimpl
def modulm_model_loaded(model: Any, config: EngineConfig) -> None:
    """Refuse the flags for models that load their weights themselves."""
    flags = config.group(OffloadConfig)
    if not flags.is_used:
        return
    from modulm_weight_offload.filling import offloaded_of

    if offloaded_of(model) is None:
        raise UnsupportedError(
            f"--{flags.first_flag.replace('_', '-')}: not for models that load their weights "
            "themselves"
        )
