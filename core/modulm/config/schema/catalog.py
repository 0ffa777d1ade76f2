"""All flags of this process: the core's groups and those of installed packages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache

from attrs import frozen

from modulm.config.schema.known import KnownFlag, find_known, known_flags
from modulm.contracts.config import CORE_GROUPS
from modulm.contracts.flags import Flag, FlagGroup, flags_of
from modulm.errors import PluginBroken, PluginConflict, PluginError
from modulm.plugins.manager import current

__all__ = ["Catalog", "Group", "catalog"]

log = logging.getLogger("modulm.config")


@frozen
class Group:
    """A class of flags, its name, and the distribution that provides it ("" for the core)."""

    name: str
    cls: type[FlagGroup]
    origin: str = ""

    @property
    def flags(self) -> tuple[Flag, ...]:
        return flags_of(self.cls)

    @property
    def summary(self) -> str:
        """The first line of the class's docstring."""
        return (self.cls.__doc__ or "").split("\n")[0].rstrip(".")


@frozen(eq=False)
class Catalog:
    """Groups in order, with flags and groups by flat name, and aliases of flags.

    `tables`: JSON-valued flags that fill a whole group. `top_level`: flags with a command-line
    option of their own, rather than a key of a table. `broken`: reasons why groups could not be
    loaded.
    """

    groups: tuple[Group, ...]
    owners: Mapping[str, Group]
    specs: Mapping[str, Flag]
    tables: Mapping[str, Group]
    aliases: Mapping[str, str]
    broken: tuple[str, ...] = ()
    top_level: frozenset[str] = frozenset()

    @classmethod
    def of(cls, groups: tuple[Group, ...], broken: tuple[str, ...] = ()) -> Catalog:
        """Build the catalog. Raises PluginConflict for a flag that two groups define."""
        owners: dict[str, Group] = {}
        specs: dict[str, Flag] = {}
        for group in groups:
            for spec in group.flags:
                if spec.name in owners:
                    raise PluginConflict(_conflict(spec, owners[spec.name], group))
                owners[spec.name], specs[spec.name] = group, spec
        tables = {group.cls.table: group for group in groups if group.cls.table}
        aliases = {
            alias.removeprefix("--").replace("-", "_"): spec.name
            for spec in specs.values()
            for alias in spec.aliases
            if alias.startswith("--")
        }
        top_level = frozenset(name for name, spec in specs.items() if not spec.nested)
        return cls(groups, owners, specs, tables, aliases, broken, top_level)

    def canonical(self, alias: str) -> str | None:
        """Return the flag or table that a name stands for; None if no group has it."""
        name = self.aliases.get(alias, alias)
        return name if name in self.tables or name in self.top_level else None

    def known(self, name: str) -> KnownFlag | None:
        """Return vLLM's flag of this flat or short name, if no installed group has it."""
        spec = None if self._has(name) else find_known(name)  # which reads a file at first
        return None if spec is None or self._has(spec.name) else spec

    def elsewhere(self) -> list[KnownFlag]:
        """Return vLLM's flags that no installed group has, grouped by reason."""
        return [spec for name, spec in known_flags().items() if not self._has(name)]

    def _has(self, name: str) -> bool:
        return name in self.specs or name in self.tables

    def spec(self, name: str) -> Flag | None:
        """Return the flag of this flat name, installed or only known."""
        return self.specs.get(name) or find_known(name)


def _conflict(spec: Flag, first: Group, second: Group) -> str:
    origins = " and by ".join(group.origin or "the core" for group in (first, second))
    return (
        f"flag {spec.option} is defined by {origins}; disable one with --plugins=-{second.origin}"
    )


def catalog() -> Catalog:
    """Return the flags of this process. Packages whose flags cannot be loaded are skipped."""
    broken: list[str] = []
    core = (Group(name, cls) for name, cls in CORE_GROUPS.items())
    return _catalog((*core, *_package_groups(broken)), tuple(broken))


def _package_groups(broken: list[str]) -> Iterator[Group]:
    """Yield the groups of packages; append to `broken` why one is skipped."""
    manager = current()
    for declaration in manager.names("flags"):
        try:
            group_class = manager.load_declared(declaration)
            if not (isinstance(group_class, type) and issubclass(group_class, FlagGroup)):
                raise PluginBroken(f"{declaration}: {declaration.target} is not a @flag_group")
        except PluginError as error:
            broken.append(str(error))
        else:
            yield Group(
                declaration.name, group_class, declaration.distribution or declaration.source
            )


@lru_cache(maxsize=8)
def _catalog(groups: tuple[Group, ...], broken: tuple[str, ...]) -> Catalog:
    for problem in broken:
        log.warning("%s", problem)
    return Catalog.of(groups, broken)
