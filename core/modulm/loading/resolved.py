"""A checkpoint, its platform, and the configuration resolved for both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import frozen

from modulm.config.resolve import Resolved, Use, choose_platform, resolve
from modulm.contracts.checkpoint import Checkpoint
from modulm.loading.checkpoint import open_checkpoint, pooling_recipe

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.decision import Decision
    from modulm.contracts.platform import Platform
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.plugins.manager import PluginManager

__all__ = ["ResolvedCheckpoint", "resolve_checkpoint"]


@frozen(eq=False)
class ResolvedCheckpoint:
    """recipe: pooling settings of its files. device: the decision for the platform."""

    checkpoint: Checkpoint
    recipe: PoolingRecipe
    platform: Platform
    device: Decision
    resolved: Resolved


def resolve_checkpoint(
    config: EngineConfig,
    plugins: PluginManager,
    use: Use = "offline",
    explicit: Iterable[str] | None = None,
) -> ResolvedCheckpoint:
    """Open the checkpoint of `--model` and resolve everything that the user left open.

    explicit: see `resolve`. Raises CheckpointError, ConfigError, UnsupportedError.
    """
    checkpoint = open_checkpoint(config, plugins)
    recipe = pooling_recipe(config, checkpoint, plugins)
    platform, device = choose_platform(config, plugins)
    resolved = resolve(
        config,
        platform=platform,
        hf_config=checkpoint.config,
        plugins=plugins,
        use=use,
        explicit=explicit,
        stored_dtype=checkpoint.info.dtype,
        trained_length=recipe.max_length,
    )
    return ResolvedCheckpoint(checkpoint, recipe, platform, device, resolved)
