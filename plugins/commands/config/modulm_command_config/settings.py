"""Formats a configuration: as a YAML file, as differences, or with the origin of each value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.config.resolve import Use
from modulm.config.schema.catalog import catalog
from modulm.config.schema.engine import EngineConfig
from modulm.config.sources import Draft, draft
from modulm_cli.yaml_file import yaml_file

__all__ = ["differences", "explained", "written"]


def written(config: EngineConfig, *, as_json: bool, everything: bool) -> str:
    """The configuration as a file that `--config` reads; secrets are masked."""
    every = {spec.name: value for spec, value in config.values()} if everything else {}
    values = every | config.changed()
    tables = _tables({name: _masked(name, value) for name, value in values.items()})
    if as_json:
        return json.dumps(tables, indent=2, default=str)
    if not tables:
        return "# every flag has its default"
    import yaml

    text: str = yaml.safe_dump(tables, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def differences(first: str, second: str | None) -> list[str]:
    """One line for each flag that two YAML files set differently; without a second, defaults."""
    left = draft(yaml_file(first)).config
    right = draft(yaml_file(second)).config if second else EngineConfig()
    names = sorted({*left.changed(), *right.changed()})
    return [
        f"{name}: {_masked(name, left.value(name))!r} -> {_masked(name, right.value(name))!r}"
        for name in names
        if left.value(name) != right.value(name)
    ]


@frozen
class _Setting:
    flag: str
    value: str
    origin: str


def explained(draft: Draft, use: Use, *, as_json: bool) -> str:
    """List every value that was set or chosen, with its origin."""
    rows = [
        _Setting(name, str(_masked(name, draft.config.value(name))), origin)
        for name, origin in draft.origins.items()
    ]
    rows += _decided(draft, use)
    if as_json:
        table = [{"flag": row.flag, "value": row.value, "from": row.origin} for row in rows]
        return json.dumps(table, indent=2)
    width = max((len(row.flag) for row in rows), default=0)
    return "\n".join(f"{row.flag:{width}}  {row.value}  ({row.origin})" for row in rows)


def _decided(draft: Draft, use: Use) -> list[_Setting]:
    """The choices for unset flags on this machine, for this checkpoint."""
    from modulm.loading import resolve_checkpoint
    from modulm.plugins import manager

    opened = resolve_checkpoint(draft.config, manager.current(), use, draft.explicit)
    decisions = [opened.device, *(d for d in opened.resolved.decisions if d.subject != "device")]
    return [
        _Setting(decision.subject, decision.winner or "", decision.reason)
        for decision in decisions
        if decision.subject not in draft.origins
    ]


def _masked(name: str, value: Any) -> Any:
    spec = catalog().spec(name)
    return "***" if value and spec is not None and spec.secret else value


def _tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move flags without a name of their own into their group's table."""
    known = catalog()
    tables: dict[str, Any] = {}
    for name, value in values.items():
        spec = known.specs.get(name)
        plain = list(value) if isinstance(value, tuple) else value
        if spec is not None and spec.nested and spec.key:
            tables.setdefault(str(known.owners[name].cls.table), {})[spec.key] = plain
        else:
            tables[name] = plain
    return tables
