"""The core's flags in frozen classes of one group each, and all groups as one configuration."""

from __future__ import annotations

from modulm.config.schema.attention import AttentionConfig
from modulm.config.schema.cache import CacheConfig
from modulm.config.schema.catalog import Catalog, Group, catalog
from modulm.config.schema.device import DeviceConfig
from modulm.config.schema.engine import EngineConfig, Notice
from modulm.config.schema.flags import Flag, FlagGroup, Kind, State, flag, flag_group, flags_of
from modulm.config.schema.load import LoadConfig
from modulm.config.schema.model import ModelConfig
from modulm.config.schema.observability import ObservabilityConfig
from modulm.config.schema.parallel import ParallelConfig
from modulm.config.schema.scheduler import SchedulerConfig
from modulm.config.schema.structured_outputs import StructuredOutputsConfig
from modulm.config.schema.tool_calls import ToolCallConfig

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
