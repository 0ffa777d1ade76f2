"""The machine: platform, threads, memory nodes, and which plugins take part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group, read_mapping
from modulm.errors import ConfigError

__all__ = ["DeviceConfig"]


def _terms(value: Any) -> tuple[str, ...] | None:
    """Parse `a,-b` or ["a", "-b"]."""
    items = [value] if isinstance(value, str) else list(value or ())
    terms = tuple(term.strip() for item in items for term in str(item).split(",") if term.strip())
    return terms or None


def _options(value: Any) -> Mapping[str, Any]:
    """Check the nesting {kind: {name: options}}; names are checked against the plugins later."""
    table = read_mapping("plugin_config", value)
    for kind, drivers in table.items():
        if not isinstance(drivers, Mapping):
            raise ConfigError("plugin_config", f"{kind}: a table of drivers is needed")
        for name, options in drivers.items():
            if not isinstance(options, Mapping):
                raise ConfigError("plugin_config", f"{kind}.{name}: a table of options is needed")
    return table


@flag_group
class DeviceConfig(FlagGroup):
    """The machine: platform, threads, memory nodes, and which plugins take part."""

    title = "DeviceConfig"

    device: str = flag(
        "auto", "Platform to run on; auto: the one with the best score.", kind="platforms",
        choices=("auto",),
    )  # fmt: skip
    cpu_threads: int | None = flag(
        None,
        "Threads that compute; None: all cores of this process.",
        unit="threads",
        least=1,
        common=True,
    )
    numa_bind: bool = flag(
        False, "Keep threads and memory to one memory node: the one with the most cores to use."
    )
    numa_bind_nodes: tuple[int, ...] | None = flag(
        None, "The memory node to bind to, by worker; binds without --numa-bind, too."
    )
    numa_bind_cpus: tuple[str, ...] | None = flag(
        None, "The cores to bind to, by worker, as in 0-3 or 0-3,8; binds without --numa-bind, too."
    )
    additional_config: Mapping[str, Any] = flag({}, "Options of the platform, checked by it.")
    plugins: tuple[str, ...] | None = flag(
        None,
        "Plugins that take part, by name or distribution; None: all. -NAME leaves one out.",
        parse=_terms,
    )
    plugin_config: Mapping[str, Any] = flag(
        {},
        "Options of drivers, checked by them: {kind: {name: {option: value}}}.",
        parse=_options,
    )
    fail_on_environ_validation: bool = flag(False, "Make an unknown MODULM_ variable an error.")

    def options(self, kind: str, name: str) -> Mapping[str, Any]:
        """Return the options in `plugin_config` for one driver."""
        table: Mapping[str, Any] = self.plugin_config.get(kind, {}).get(name, {})
        return table
