"""vLLM's configuration classes, as the tables that modulm's flags take."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AttentionConfig",
    "CompilationConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]


class _Table(dict[str, Any]):
    """A dictionary of keywords whose items are also attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} was not given {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class AttentionConfig(_Table):
    """Of `attention_config`."""


class CompilationConfig(_Table):
    """Of `compilation_config`, or its level alone."""

    def __init__(self, level: int | None = None, **values: Any) -> None:
        super().__init__(**({} if level is None else {"level": level}), **values)


class KVEventsConfig(_Table):
    """Of `kv_events_config`."""


class KVTransferConfig(_Table):
    """Of `kv_transfer_config`."""


class PoolerConfig(_Table):
    """Of `pooler_config`."""


class ProfilerConfig(_Table):
    """Of `profiler_config`."""


class SpeculativeConfig(_Table):
    """Of `speculative_config`."""


class StructuredOutputsConfig(_Table):
    """Of `structured_outputs_config`."""
