"""Determine whether a model needs a pooler, and which: by its files, `--runner` and `--convert`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.contracts.pooler import Pooler
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.plugins.manager import PluginManager

__all__ = ["generates", "may_convert", "open_pooler", "pooling_settings"]

_KEY, _STANDARD = "pooler", "standard"


def open_pooler(config: EngineConfig, plugins: PluginManager, model: Model | None = None) -> Pooler:
    """Return the pooler that `--pooler-config` names, else that of a model that also generates.

    Raises PluginNotFound with its distribution.
    """
    model_pooler = model.pooler if model is not None and "generate" in model.tasks else ""
    name = (config.model.pooler_config or {}).get(_KEY, model_pooler or _STANDARD)
    pooler: Pooler = plugins.load("poolers", name)()
    return pooler


def may_convert(
    config: EngineConfig, names: Sequence[str], plugins: PluginManager, recipe: PoolingRecipe
) -> bool:
    """Whether a pooler must choose the driver: because of flags or files, or because no driver
    exists for the architecture and a pooler may derive one.
    """
    model = config.model
    if model.convert not in ("auto", "none") or model.runner == "pooling" or recipe.kind:
        return True
    drivers = {declared.name for declared in plugins.names("models")}
    return names[0] not in drivers and bool(plugins.names("poolers"))


def generates(config: EngineConfig, model: Model, architecture: str) -> bool:
    """Whether the model only generates text and no pooler is named. Raises ConfigError if
    `--runner` requires generation and it cannot.
    """
    if "generate" not in model.tasks and config.model.runner == "generate":
        raise ConfigError("runner", f"{architecture} cannot generate; use pooling")
    plain = model.tasks == ("generate",) and not model.pooler
    return plain and not config.model.pooler_config


def pooling_settings(config: EngineConfig, recipe: PoolingRecipe) -> dict[str, Any]:
    """Return the settings of `--pooler-config`, then those of the checkpoint's other files."""
    settings = {**recipe.settings, **(config.model.pooler_config or {})}
    return {key: value for key, value in settings.items() if key != _KEY}
