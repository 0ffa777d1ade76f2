"""All groups of flags as one value, and its construction from a flat table of flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import attrs
from attrs import frozen

from modulm.config.schema.catalog import Catalog, catalog
from modulm.config.schema.known import read_known
from modulm.contracts import config as contract
from modulm.contracts.config.engine import CORE_GROUPS, Notice, default_group
from modulm.contracts.flags import Flag, FlagGroup, Kind, read_mapping, suggest
from modulm.errors import ConfigError

__all__ = ["EngineConfig", "Notice", "flatten"]


@frozen(kw_only=True)
class EngineConfig(contract.EngineConfig):
    """The configuration of an engine and its server, with the flags of installed packages.

    The groups are attributes of `modulm.contracts.config.EngineConfig`.
    """

    @classmethod
    def from_keywords(cls, **flags: Any) -> EngineConfig:
        """Build a configuration from flag names with underscores, as `LLM(...)` takes them.

        Raises ConfigError for an unknown name (with close matches), a value of the wrong type or
        range, a flag that cannot be set here, and contradicting values.
        """
        return cls().with_(**flags)

    def with_(self, **flags: Any) -> Self:
        """Return a copy with some flags changed, by their flat names."""
        return self.with_parts(flatten(flags))

    def with_parts(self, flat: Mapping[str, Any]) -> Self:
        """Return a copy with some fields changed, named as `flatten` returns them."""
        known = catalog()
        changed: dict[type[FlagGroup], dict[str, Any]] = {}
        unread = dict(self.unread)
        for name, value in flat.items():
            owner = known.owners.get(name)
            if owner is None:
                unread[name] = _read_unread(known, name, value)
            else:
                changed.setdefault(owner.cls, {})[name] = value
        groups = {
            cls: attrs.evolve(self.group(cls), **fields)  # type: ignore[misc]
            for cls, fields in changed.items()
        }
        config = self._replaced(groups, {k: v for k, v in unread.items() if v is not None})
        _check_together(config)
        return config

    def _replaced(self, groups: Mapping[type[FlagGroup], Any], unread: Mapping[str, Any]) -> Self:
        core = {_CORE[cls]: value for cls, value in groups.items() if cls in _CORE}
        others = {**self.package_groups, **{k: v for k, v in groups.items() if k not in _CORE}}
        package_groups = {
            cls: value for cls, value in others.items() if value != default_group(cls)
        }
        return attrs.evolve(self, **core, package_groups=package_groups, unread=unread)

    def value(self, flag: str) -> Any:
        """Return the value of a flag by its flat name; its default if no installed package reads
        it.
        """
        known = catalog()
        owner = known.owners.get(flag)
        if owner is not None:
            return getattr(self.group(owner.cls), flag)
        spec = known.known(flag)
        return self.unread.get(flag, spec.default if spec is not None else None)

    def values(self) -> Iterator[tuple[Flag, Any]]:
        """Yield every flag that is read, with its value."""
        for group in catalog().groups:
            values = self.group(group.cls)
            for spec in group.flags:
                yield spec, getattr(values, spec.name)

    def changed(self) -> dict[str, Any]:
        """Return the flags that differ from their defaults, by flat name."""
        read = {spec.name: value for spec, value in self.values() if spec.changed(value)}
        return {**read, **self.unread}

    def notices(self) -> tuple[Notice, ...]:
        """Return notices about flags that are deprecated or have no effect."""
        known = catalog()
        specs = [spec for name in self.changed() if (spec := known.spec(name)) is not None]
        return tuple(Notice(spec.option, remark) for spec in specs if (remark := _remark(spec)))


_CORE = {cls: name for name, cls in CORE_GROUPS.items()}


def _remark(spec: Flag) -> str:
    parts = [f"deprecated: {spec.deprecated}"] if spec.deprecated else []
    if spec.state.kind is Kind.NO_EFFECT:
        parts.append(str(spec.state))
    if spec.state.kind is Kind.RENAMED:
        parts.append(f"deprecated: {spec.state.reason}")
    return "; ".join(parts)


def flatten(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Expand tables to their flags, resolve aliases and reject unknown names.

    A renamed flag is also set under its new name; an explicit value of the new name wins.
    """
    known = catalog()
    flat: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    for alias, value in flags.items():
        name = _canonical_name(known, alias)
        parts = _spread(known, name, value) if name in known.tables else {name: value}
        for part, item in parts.items():
            if part in flat and flat[part] != item:
                raise ConfigError(part, f"is set twice, to {flat[part]!r} and to {item!r}")
            flat[part] = item
        renamed = known.known(name)
        if renamed is not None and renamed.target and value is not None:
            table, _, key = renamed.target.partition(".")
            moved |= _spread(known, table, {key: value}) if key else {table: value}
    return {**moved, **flat}


def _canonical_name(known: Catalog, alias: str) -> str:
    name = known.canonical(alias)
    if name is not None:
        return name
    if known.known(alias) is not None:
        return alias
    close = suggest(alias, [*known.top_level, *known.tables, *known.aliases])
    broken = "".join(f" ({problem})" for problem in known.broken)
    raise ConfigError(alias, f"is not a flag{close}{broken}")


def _spread(known: Catalog, table: str, value: Any) -> dict[str, Any]:
    """Return the fields of a group from its JSON table."""
    keys = {spec.key: spec.name for spec in known.tables[table].flags if spec.key}
    parts: dict[str, Any] = {}
    for key, item in read_mapping(table, value).items():
        dotted = f"{table}.{key}"
        if key not in keys and known.known(dotted) is None:
            raise ConfigError(dotted, f"is not a key of {table}{suggest(key, [*keys])}")
        parts[keys.get(key, dotted)] = item
    return parts


def _read_unread(known: Catalog, name: str, value: Any) -> Any:
    spec = known.known(name)
    if spec is None:
        raise ConfigError(name, "is not a flag")
    return read_known(spec, value)


def _check_together(config: EngineConfig) -> None:
    """Raise ConfigError for contradicting values."""
    scheduler = config.scheduler
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if tokens is not None and rows is not None and tokens < rows:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{tokens} is less than max_num_seqs {rows}: raise it to {rows}",
        )
    longest = config.model.max_model_len
    if scheduler.enable_chunked_prefill is not False or tokens is None or longest is None:
        return
    if tokens < longest:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{tokens} is less than max_model_len {longest}, and enable_chunked_prefill is off",
        )
