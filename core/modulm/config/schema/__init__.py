"""The core's flags as frozen classes, one per group, and all groups as one configuration."""

from __future__ import annotations

from modulm.config.schema.catalog import Catalog, Group, catalog
from modulm.config.schema.engine import EngineConfig, Notice
from modulm.contracts.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    ToolCallConfig,
)
from modulm.contracts.flags import Flag, FlagGroup, Kind, State, flag, flag_group, flags_of

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "Catalog",
    "DeviceConfig",
    "EngineConfig",
    "Flag",
    "FlagGroup",
    "Group",
    "Kind",
    "LoadConfig",
    "ModelConfig",
    "Notice",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "State",
    "StructuredOutputsConfig",
    "ToolCallConfig",
    "catalog",
    "flag",
    "flag_group",
    "flags_of",
]
