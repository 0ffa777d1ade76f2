"""All groups of flags as one value, and how a flat table of flags becomes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import field, frozen

from modulm.config.schema.attention import AttentionConfig
from modulm.config.schema.cache import CacheConfig
from modulm.config.schema.compilation import CompilationConfig
from modulm.config.schema.device import DeviceConfig
from modulm.config.schema.flags import Flag, Kind, flags_of, read_mapping, suggest
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
from modulm.errors import ConfigError

__all__ = [
    "GROUPS",
    "TABLES",
    "EngineConfig",
    "Notice",
    "all_flags",
    "canonical",
    "flatten",
    "is_flag",
    "spec_of",
]

#: attribute of EngineConfig -> class, in the order in which help and docs show them
GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "load": LoadConfig,
    "attention": AttentionConfig,
    "structured_outputs": StructuredOutputsConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "multimodal": MultiModalConfig,
    "lora": LoRAConfig,
    "observability": ObservabilityConfig,
    "scheduler": SchedulerConfig,
    "compilation": CompilationConfig,
    "speculative": SpeculativeConfig,
    "device": DeviceConfig,
    "frontend": ServerConfig,
}

#: JSON-valued flag that fills the fields of a whole group -> that group's attribute
TABLES: dict[str, str] = {
    group.TABLE: name  # type: ignore[attr-defined]
    for name, group in GROUPS.items()
    if group.TABLE  # type: ignore[attr-defined]
}

_OWNERS: dict[str, str] = {
    spec.name: name for name, group in GROUPS.items() for spec in flags_of(group)
}


def all_flags() -> Iterator[tuple[str, Flag]]:
    """Every flag with the attribute of its group."""
    for name, group in GROUPS.items():
        for spec in flags_of(group):
            yield name, spec


@frozen
class Notice:
    """What the user should know about a value that was accepted."""

    flag: str
    message: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.message}"


@frozen(kw_only=True)
class EngineConfig:
    """Everything an engine and its server are told before they start; never changed after."""

    model: ModelConfig = field(factory=ModelConfig)
    load: LoadConfig = field(factory=LoadConfig)
    attention: AttentionConfig = field(factory=AttentionConfig)
    structured_outputs: StructuredOutputsConfig = field(factory=StructuredOutputsConfig)
    parallel: ParallelConfig = field(factory=ParallelConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    multimodal: MultiModalConfig = field(factory=MultiModalConfig)
    lora: LoRAConfig = field(factory=LoRAConfig)
    observability: ObservabilityConfig = field(factory=ObservabilityConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    compilation: CompilationConfig = field(factory=CompilationConfig)
    speculative: SpeculativeConfig = field(factory=SpeculativeConfig)
    device: DeviceConfig = field(factory=DeviceConfig)
    frontend: ServerConfig = field(factory=ServerConfig)

    @classmethod
    def from_keywords(cls, **flags: Any) -> EngineConfig:
        """A configuration from flag names with underscores, as `LLM(...)` takes them.

        Raises ConfigError for an unknown name (with close matches), a value of the wrong type or
        range, a flag that cannot be set yet, and values that contradict each other.
        """
        return cls().with_(**flags)

    def with_(self, **flags: Any) -> EngineConfig:
        """A copy with some flags changed, by their flat names."""
        return self.with_parts(flatten(flags))

    def with_parts(self, flat: Mapping[str, Any]) -> EngineConfig:
        """A copy with some fields changed, named as `flatten` returns them."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            changed.setdefault(_OWNERS[name], {})[name] = value
        groups = {name: attrs.evolve(self.group(name), **own) for name, own in changed.items()}
        config = attrs.evolve(self, **groups)
        _check_together(config)
        return config

    def group(self, name: str) -> Any:
        """The group with this attribute name."""
        return {
            part.name: value
            for part, value in zip(attrs.fields(type(self)), _values(self), strict=True)
        }[name]

    def value(self, flag: str) -> Any:
        """The value of one flag by its flat name."""
        return _as_table(self.group(_OWNERS[flag]))[flag]

    def changed(self) -> dict[str, Any]:
        """The flags that differ from their defaults, by flat name."""
        return {
            spec.name: self.value(spec.name)
            for _, spec in all_flags()
            if spec.changed(self.value(spec.name))
        }

    def notices(self) -> tuple[Notice, ...]:
        """What to print about flags that were set but are deprecated or change nothing."""
        changed = self.changed()
        return tuple(
            Notice(spec.option, _remark(spec)) for _, spec in all_flags()
            if spec.name in changed and _remark(spec)
        )  # fmt: skip


def _values(config: EngineConfig) -> tuple[Any, ...]:
    return attrs.astuple(config, recurse=False)


def _as_table(group: Any) -> dict[str, Any]:
    return attrs.asdict(group, recurse=False)


def _remark(spec: Flag) -> str:
    parts = [f"deprecated: {spec.deprecated}"] if spec.deprecated else []
    if spec.state.kind is Kind.NO_EFFECT and spec.state.reason != spec.deprecated:
        parts.append(f"no effect: {spec.state.reason}")
    return "; ".join(parts)


def flatten(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of whole groups spread over their flags, aliases resolved, unknown names refused."""
    flat: dict[str, Any] = {}
    for given, value in flags.items():
        name = _known(given)
        parts = _spread(name, value) if name in TABLES else {name: value}
        for part, item in parts.items():
            if part in flat and flat[part] != item:
                raise ConfigError(part, f"is given twice, as {flat[part]!r} and as {item!r}")
            flat[part] = item
    return _renamed(flat)


_OWN = frozenset(spec.name for _, spec in all_flags() if spec.own)
_ALIASES = {
    alias.removeprefix("--").replace("-", "_"): spec.name
    for _, spec in all_flags()
    for alias in spec.aliases
    if alias.startswith("--")
}


_SPECS = {spec.name: spec for _, spec in all_flags()}


def spec_of(name: str) -> Flag | None:
    """The flag of this name, if there is one."""
    return _SPECS.get(name)


def is_flag(name: str) -> bool:
    """Whether the name can be set: a flag, the table of a group, or another name of a flag."""
    return canonical(name) is not None


def canonical(given: str) -> str | None:
    """The flag or table that a name means; None if it means nothing."""
    name = _ALIASES.get(given, given)
    return name if name in _OWN or name in TABLES else None


def _known(given: str) -> str:
    name = canonical(given)
    if name is None:
        known = (*_OWN, *TABLES, *_ALIASES)
        raise ConfigError(given, f"is no flag{suggest(given, known)}")
    return name


def _spread(table: str, value: Any) -> dict[str, Any]:
    """The fields of a group from its JSON table."""
    keys = {spec.key: spec.name for spec in flags_of(GROUPS[TABLES[table]]) if spec.key}
    parts: dict[str, Any] = {}
    for key, item in read_mapping(table, value).items():
        if key not in keys:
            raise ConfigError(f"{table}.{key}", f"is no key of {table}{suggest(key, [*keys])}")
        parts[keys[key]] = item
    return parts


#: deprecated flag -> the one whose value it sets
_RENAMED = {
    "guided_decoding_backend": "backend",
    "guided_decoding_disable_any_whitespace": "disable_any_whitespace",
    "guided_decoding_disable_additional_properties": "disable_additional_properties",
}


def _renamed(flat: dict[str, Any]) -> dict[str, Any]:
    """Values of renamed flags under their new names as well; the new name wins."""
    moved = {new: flat[old] for old, new in _RENAMED.items() if flat.get(old) is not None}
    return {**moved, **flat}


def _check_together(config: EngineConfig) -> None:
    """Raise ConfigError for values that contradict each other."""
    scheduler, server = config.scheduler, config.frontend
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if tokens is not None and rows is not None and tokens < rows:
        raise ConfigError(
            "max_num_batched_tokens", f"{tokens} is below max_num_seqs {rows}: raise it to {rows}"
        )
    if scheduler.enable_chunked_prefill is False:
        _check_whole_prompts(config)
    if (server.ssl_keyfile is None) != (server.ssl_certfile is None):
        raise ConfigError("ssl_certfile", "goes together with ssl_keyfile: give both or none")


def _check_whole_prompts(config: EngineConfig) -> None:
    tokens, longest = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    if tokens is not None and longest is not None and tokens < longest:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{tokens} is below max_model_len {longest}, and enable_chunked_prefill is off",
        )
