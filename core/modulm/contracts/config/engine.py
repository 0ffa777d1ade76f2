"""The engine's configuration as seen by drivers and hooks: all flag groups in one value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Self, TypeVar

from attrs import field, frozen

from modulm.contracts.config.attention import AttentionConfig
from modulm.contracts.config.cache import CacheConfig
from modulm.contracts.config.device import DeviceConfig
from modulm.contracts.config.load import LoadConfig
from modulm.contracts.config.model import ModelConfig
from modulm.contracts.config.observability import ObservabilityConfig
from modulm.contracts.config.parallel import ParallelConfig
from modulm.contracts.config.scheduler import SchedulerConfig
from modulm.contracts.config.structured_outputs import StructuredOutputsConfig
from modulm.contracts.config.tool_calls import ToolCallConfig
from modulm.contracts.flags import Flag, FlagGroup

__all__ = ["CORE_GROUPS", "EngineConfig", "Notice", "default_group"]

G = TypeVar("G", bound=FlagGroup)

#: Attribute of EngineConfig -> class, in the order of help and docs.
CORE_GROUPS: Mapping[str, type[FlagGroup]] = {
    "model": ModelConfig,
    "load": LoadConfig,
    "attention": AttentionConfig,
    "structured_outputs": StructuredOutputsConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "observability": ObservabilityConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "tool_calls": ToolCallConfig,
}
_ATTRIBUTES = {group: name for name, group in CORE_GROUPS.items()}


@frozen
class Notice:
    """A message to the user about an accepted value."""

    flag: str
    message: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.message}"


@cache
def _make(group: Any) -> Any:
    return group()


def default_group(group: Any) -> Any:
    """Return a group with its default values."""
    return _make(group)


@frozen(kw_only=True)
class EngineConfig(ABC):
    """The configuration of an engine and its server. Immutable.

    The core's groups are attributes. package_groups: groups of packages that differ from their
    defaults; read them with `group`. unread: flags that were set although no installed package
    reads them. Use `modulm.config.EngineConfig` to create configurations.
    """

    model: ModelConfig = field(factory=ModelConfig)
    load: LoadConfig = field(factory=LoadConfig)
    attention: AttentionConfig = field(factory=AttentionConfig)
    structured_outputs: StructuredOutputsConfig = field(factory=StructuredOutputsConfig)
    parallel: ParallelConfig = field(factory=ParallelConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    observability: ObservabilityConfig = field(factory=ObservabilityConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    device: DeviceConfig = field(factory=DeviceConfig)
    tool_calls: ToolCallConfig = field(factory=ToolCallConfig)
    package_groups: Mapping[type[FlagGroup], FlagGroup] = field(factory=dict)
    unread: Mapping[str, Any] = field(factory=dict)

    def group(self, cls: type[G]) -> G:
        """Return a flag group of the core or a package: `config.group(Dice).sides`."""
        attribute = _ATTRIBUTES.get(cls)
        values: Any = (
            self.package_groups.get(cls) if attribute is None else getattr(self, attribute)
        )
        group: G = default_group(cls) if values is None else values
        return group

    @abstractmethod
    def value(self, flag: str) -> Any:
        """Return a flag's value by its flat name, or the default if its group is not installed."""

    @abstractmethod
    def values(self) -> Iterator[tuple[Flag, Any]]:
        """Iterate over all flags of the installed groups with their values."""

    @abstractmethod
    def changed(self) -> dict[str, Any]:
        """Return the flags that differ from their defaults, by flat name."""

    @abstractmethod
    def with_(self, **flags: Any) -> Self:
        """Return a copy with some flags changed, by flat name. Raises ConfigError."""

    @abstractmethod
    def with_parts(self, flat: Mapping[str, Any]) -> Self:
        """Return a copy with some flags changed, named like the fields of their groups."""

    @abstractmethod
    def notices(self) -> tuple[Notice, ...]:
        """Return messages about flags that were set but are deprecated or have no effect."""
