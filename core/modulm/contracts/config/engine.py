"""All groups of flags as one value: what drivers and hooks read."""

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

#: Attribute of EngineConfig -> class, in the order in which help and docs show the groups.
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
    """What the user should know about a value that was accepted."""

    flag: str
    message: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.message}"


@cache
def _make(group: Any) -> Any:
    return group()


def default_group(group: Any) -> Any:
    """The values that a group has when no flag of it is set."""
    return _make(group)


@frozen(kw_only=True)
class EngineConfig(ABC):
    """The configuration of an engine and its server. Immutable.

    The groups that the core reads are attributes. `brought` holds the groups of packages that
    differ from their defaults; read them with `group`. `idle` holds flags that were set and that
    no installed package reads. `modulm.config.EngineConfig` makes configurations.
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
    brought: Mapping[type[FlagGroup], FlagGroup] = field(factory=dict)
    idle: Mapping[str, Any] = field(factory=dict)

    def group(self, cls: type[G]) -> G:
        """The values of one group, the core's or a package's: `config.group(Dice).sides`."""
        attribute = _ATTRIBUTES.get(cls)
        values: Any = self.brought.get(cls) if attribute is None else getattr(self, attribute)
        group: G = default_group(cls) if values is None else values
        return group

    @abstractmethod
    def value(self, flag: str) -> Any:
        """The value of one flag by its flat name; its default where no installed group has it."""

    @abstractmethod
    def values(self) -> Iterator[tuple[Flag, Any]]:
        """Every flag of the installed groups, with its value."""

    @abstractmethod
    def changed(self) -> dict[str, Any]:
        """The flags that differ from their defaults, by flat name."""

    @abstractmethod
    def with_(self, **flags: Any) -> Self:
        """A copy with some flags changed, by their flat names. Raises ConfigError."""

    @abstractmethod
    def with_parts(self, flat: Mapping[str, Any]) -> Self:
        """A copy with some flags changed, each named as a field of its group."""

    @abstractmethod
    def notices(self) -> tuple[Notice, ...]:
        """What to print about flags that were set but are deprecated or change nothing."""
