"""Finds the step parts of installed distributions (group `modulm.step_parts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.step_part import BuiltModel, PartRunner, StepPart
    from modulm.plugins.manager import PluginManager

__all__ = ["open_parts", "open_runners"]


def open_parts(config: EngineConfig, plugins: PluginManager) -> tuple[StepPart, ...]:
    """Return the installed parts that this configuration uses, sorted by name.

    Raises PluginNotFound if a configured driver needs a part that is not installed.
    """
    tables = config.device.plugin_config
    names = {declared.name for declared in plugins.names("step_parts")}
    names |= {kind.part for kind in KINDS.values() if kind.part and tables.get(kind.name)}
    parts = (plugins.load("step_parts", name).opened(config, plugins) for name in sorted(names))
    return tuple(part for part in parts if part is not None)


def open_runners(parts: Iterable[StepPart], built: BuiltModel) -> dict[str, PartRunner]:
    """Build the runners for a model, by name of the part; parts without a runner are left out."""
    runners = ((part.name, part.runner(built)) for part in parts)
    return {name: runner for name, runner in runners if runner is not None}
