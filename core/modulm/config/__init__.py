"""Configuration of the engine and its server: flag schema, sources of values, resolution of
`auto`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm.config.schema import (
        AttentionConfig,
        CacheConfig,
        DeviceConfig,
        EngineConfig,
        LoadConfig,
        ModelConfig,
        Notice,
        ObservabilityConfig,
        ParallelConfig,
        SchedulerConfig,
        StructuredOutputsConfig,
        ToolCallConfig,
    )

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LoadConfig",
    "ModelConfig",
    "Notice",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "StructuredOutputsConfig",
    "ToolCallConfig",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modulm.config import schema

    return getattr(schema, name)
