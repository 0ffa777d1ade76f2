"""A model runner by itself, for tests of what runs below the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.contracts.step_part import BuiltModel
from modulm.engine.parts import open_runners
from modulm.engine.worker.model_runner import ModelRunner
from modulm.loading import load_model, open_checkpoint
from modulm.parallel import Mesh
from modulm.testing.engines import step_parts

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.connector import KVConnector
    from modulm.plugins.manager import PluginManager

__all__ = ["open_runner"]


def open_runner(
    config: EngineConfig,
    plugins: PluginManager,
    *,
    connector: KVConnector | None = None,
) -> ModelRunner:
    """The runner of a checkpoint, with the installed step parts and those of the connector."""
    name = config.device.device
    platform = plugins.load("platforms", "cpu" if name == "auto" else name)()
    parts = step_parts(connector)
    masks = any(part.masks for part in parts)
    loaded = load_model(config, open_checkpoint(config, plugins), platform, plugins, masks=masks)
    built = BuiltModel(
        config=config, loaded=loaded, platform=platform, plugins=plugins, mesh=Mesh()
    )
    return ModelRunner(
        config,
        loaded,
        platform,
        plugins,
        parts=open_runners(parts, built),
    )
