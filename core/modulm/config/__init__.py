"""What the engine and its server are told: the schema, its sources, and how `auto` is resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modulm.config import schema

    return getattr(schema, name)
