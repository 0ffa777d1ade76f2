"""All flags of this process: the core's groups and those that installed packages bring."""

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
    """A class of flags, the name it goes by, and who brings it ("" the core)."""

    name: str
    cls: type[FlagGroup]
    origin: str = ""

    @property
    def flags(self) -> tuple[Flag, ...]:
        return flags_of(self.cls)

    @property
    def summary(self) -> str:
        """The first line of what the class says of itself."""
        return (self.cls.__doc__ or "").split("\n")[0].rstrip(".")


@frozen(eq=False)
class Catalog:
    """Groups in their order; flags and groups by flat name; other names of flags.

    `tables`: JSON-valued flag that fills a whole group. `own`: flags that are set by a name of
    their own, not by a key of a table. `broken`: why groups are left out.
    """

    groups: tuple[Group, ...]
    owners: Mapping[str, Group]
    specs: Mapping[str, Flag]
    tables: Mapping[str, Group]
    aliases: Mapping[str, str]
    broken: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()

    @classmethod
    def of(cls, groups: tuple[Group, ...], broken: tuple[str, ...] = ()) -> Catalog:
        """Raises PluginConflict for a flag that two groups have."""
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
        own = frozenset(name for name, spec in specs.items() if spec.own)
        return cls(groups, owners, specs, tables, aliases, broken, own)

    def canonical(self, given: str) -> str | None:
        """The flag or table that a name means; None if no group has it."""
        name = self.aliases.get(given, given)
        return name if name in self.tables or name in self.own else None

    def known(self, name: str) -> KnownFlag | None:
        """The flag of this flat or short name that no group here has, if it is one of vLLM's."""
        spec = find_known(name)
        return None if spec is None or self._has(spec.name) else spec

    def elsewhere(self) -> list[KnownFlag]:
        """vLLM's flags that no group here has, those of one reason together."""
        return [spec for name, spec in known_flags().items() if not self._has(name)]

    def _has(self, name: str) -> bool:
        return name in self.specs or name in self.tables

    def spec(self, name: str) -> Flag | None:
        """The flag of this flat name, whether it is here or only known."""
        return self.specs.get(name) or find_known(name)


def _conflict(spec: Flag, first: Group, second: Group) -> str:
    origins = " and by ".join(group.origin or "the core" for group in (first, second))
    return f"flag {spec.option} is brought by {origins}; switch one off: --plugins=-{second.origin}"


def catalog() -> Catalog:
    """The flags that this process has now; a package whose flags cannot be loaded is left out."""
    broken: list[str] = []
    core = (Group(name, cls) for name, cls in CORE_GROUPS.items())
    return _catalog((*core, *_brought(broken)), tuple(broken))


def _brought(broken: list[str]) -> Iterator[Group]:
    """The groups of packages; why one is left out is added to `broken`."""
    manager = current()
    for declaration in manager.names("flags"):
        try:
            found = manager.load_declared(declaration)
            if not (isinstance(found, type) and issubclass(found, FlagGroup)):
                raise PluginBroken(f"{declaration}: {declaration.target} is no @flag_group")
        except PluginError as error:
            broken.append(str(error))
        else:
            yield Group(declaration.name, found, declaration.distribution or declaration.source)


@lru_cache(maxsize=8)
def _catalog(groups: tuple[Group, ...], broken: tuple[str, ...]) -> Catalog:
    for problem in broken:
        log.warning("%s", problem)
    return Catalog.of(groups, broken)
