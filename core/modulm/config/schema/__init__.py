"""Every flag, in frozen classes of one group each."""

from __future__ import annotations

from modulm.config.schema.attention import AttentionConfig
from modulm.config.schema.cache import CacheConfig
from modulm.config.schema.compilation import CompilationConfig
from modulm.config.schema.device import DeviceConfig
from modulm.config.schema.engine import GROUPS, TABLES, EngineConfig, Notice, all_flags, flatten
from modulm.config.schema.flags import Flag, Kind, State, flags_of
from modulm.config.schema.frontend import ServerConfig
from modulm.config.schema.load import LoadConfig
from modulm.config.schema.lora import LoRAConfig
from modulm.config.schema.model import ModelConfig
from modulm.config.schema.multimodal import MultiModalConfig
from modulm.config.schema.observability import ObservabilityConfig
from modulm.config.schema.parallel import ParallelConfig
from modulm.config.schema.scheduler import SchedulerConfig
from modulm.config.schema.speculative import SpeculativeConfig
from modulm.config.schema.structured_outputs import StructuredOutputsConfig

__all__ = [
    "GROUPS",
    "TABLES",
    "AttentionConfig",
    "CacheConfig",
    "CompilationConfig",
    "DeviceConfig",
    "EngineConfig",
    "Flag",
    "Kind",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "MultiModalConfig",
    "Notice",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "State",
    "StructuredOutputsConfig",
    "all_flags",
    "flags_of",
    "flatten",
]
