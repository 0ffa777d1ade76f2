"""What the engine and its server are told: the schema, its sources, and how `auto` is resolved."""

from __future__ import annotations

from modulm.config.schema import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    Notice,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "CompilationConfig",
    "DeviceConfig",
    "EngineConfig",
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
    "StructuredOutputsConfig",
]
