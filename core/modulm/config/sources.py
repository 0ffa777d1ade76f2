"""Sources of values in order of precedence: command line or keywords, YAML file, environment,
defaults.

Groups of flags are loaded when a configuration is built, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.config.environ import variables
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.config.schema.engine import EngineConfig
    from modulm.contracts.config import Notice

__all__ = ["Draft", "Source", "draft", "environment", "keywords"]

_PREFIX = "MODULM_"
_FOREIGN = "VLLM_"


@frozen
class Source:
    """Values of one origin. `label(flag)` describes where a value was set."""

    title: str
    values: Mapping[str, Any]
    labels: Mapping[str, str] = field(factory=dict)
    remarks: tuple[str, ...] = ()

    def label(self, name: str) -> str:
        """Return where a flag was set: `MODULM_PORT`, `serve.yaml` or `command line`."""
        return self.labels.get(name, self.title)


@frozen
class Draft:
    """A configuration with the origin of every value that was set."""

    config: EngineConfig
    origins: Mapping[str, str] = field(factory=dict)
    notices: tuple[Notice, ...] = ()

    @property
    def explicit(self) -> frozenset[str]:
        """The flags that were set explicitly."""
        return frozenset(self.origins)


def draft(*sources: Source) -> Draft:
    """Merge sources into a configuration, the strongest first.

    Raises ConfigError naming the flag and where its value was set.
    """
    from modulm.config.schema.engine import EngineConfig, Notice

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        for name, value in _flat(source).items():
            if name not in values:
                values[name], origins[name] = value, source.label(name)
    try:
        config = EngineConfig().with_parts(values)
    except ConfigError as error:
        raise _located(error, origins.get(error.field)) from None
    remarks = [remark for source in sources for remark in source.remarks]
    if remarks and config.device.fail_on_environ_validation:
        raise ConfigError("fail_on_environ_validation", "; ".join(remarks))
    noticed = tuple(Notice("environment", remark) for remark in remarks)
    return Draft(config, origins, (*noticed, *config.notices()))


def _located(error: ConfigError, where: str | None) -> ConfigError:
    """Add where the value was set to an error, unless the flag's name makes that plain."""
    if where is None or where == "keyword" or where.startswith("--"):
        return error
    return ConfigError(error.field, f"{error.message} (from {where})")


def _flat(source: Source) -> dict[str, Any]:
    from modulm.config.schema.engine import flatten

    try:
        return flatten(source.values)
    except ConfigError as error:
        where = "keyword" if source.title == "command line" else source.title
        raise _located(error, where) from None


def keywords(**flags: Any) -> Draft:
    """Build the configuration of `LLM(**flags)`: keywords, then the environment, then defaults."""
    return draft(Source("keyword", flags), environment())


def environment(environ: Mapping[str, str] | None = None) -> Source:
    """Read `MODULM_<FLAG>` for every flag; lists are comma-separated or JSON."""
    from modulm.config.schema.catalog import catalog

    known = catalog()
    table = variables() if environ is None else environ
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    remarks: list[str] = []
    for key in sorted(table):
        if key.startswith(_PREFIX):
            alias = key.removeprefix(_PREFIX).lower()
            name = known.canonical(alias) or (alias if known.known(alias) else None)
            if name is None:
                remarks.append(f"{key} is not a flag of modulm and is ignored")
                continue
            values[name], labels[name] = _from_text(name, table[key]), key
        elif key.startswith(_FOREIGN) and known.canonical(key.removeprefix(_FOREIGN).lower()):
            ours = key.replace(_FOREIGN, _PREFIX, 1)
            remarks += () if ours in table else (f"{key} is ignored; set {ours}",)
    return Source("environment", values, labels, tuple(remarks))


def _from_text(name: str, text: str) -> Any:
    from modulm.config.schema.catalog import catalog

    spec = catalog().spec(name)
    if spec is None or not spec.is_list or text.lstrip().startswith("["):
        return text
    return [part.strip() for part in text.split(",") if part.strip()]
