"""The settings of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.structure import structure_table
from modulm_kv_events.flags import KVEventsConfig, Settings

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["settings_of"]


def settings_of(config: EngineConfig) -> Settings:
    """Return the settings of a configuration."""
    return structure_table(config.group(KVEventsConfig).kv_events_config, Settings)
