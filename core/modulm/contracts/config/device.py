"""The machine: platform, threads, NUMA nodes, and which plugins to use."""

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
            raise ConfigError("plugin_config", f"{kind}: must be a table of drivers")
        for name, options in drivers.items():
            if not isinstance(options, Mapping):
                raise ConfigError("plugin_config", f"{kind}.{name}: must be a table of options")
    return table


@flag_group
class DeviceConfig(FlagGroup):
    """The machine: platform, threads, NUMA nodes, and which plugins to use."""

    title = "DeviceConfig"

    device: str = flag(
        "auto", "Platform to run on; auto: the one with the highest score.", kind="platforms",
        choices=("auto",),
    )  # fmt: skip
    cpu_threads: int | None = flag(
        None,
        "Compute threads. Default: all cores of this process.",
        unit="threads",
        least=1,
        common=True,
    )
    numa_bind: bool = flag(
        False, "Bind threads and memory to one NUMA node: the one with the most available cores."
    )
    numa_bind_nodes: tuple[int, ...] | None = flag(
        None, "NUMA node to bind each worker to; does not require --numa-bind."
    )
    numa_bind_cpus: tuple[str, ...] | None = flag(
        None, "Cores to bind each worker to, e.g. 0-3 or 0-3,8; does not require --numa-bind."
    )
    additional_config: Mapping[str, Any] = flag({}, "Options of the platform.")
    plugins: tuple[str, ...] | None = flag(
        None,
        "Plugins to use, by name or distribution. Default: all; -NAME excludes one.",
        parse=_terms,
    )
    plugin_config: Mapping[str, Any] = flag(
        {}, "Options of drivers: {kind: {name: {option: value}}}.", parse=_options
    )
    fail_on_environ_validation: bool = flag(False, "Reject unknown MODULM_ environment variables.")

    def options(self, kind: str, name: str) -> Mapping[str, Any]:
        """Return the options in `plugin_config` for one driver."""
        table: Mapping[str, Any] = self.plugin_config.get(kind, {}).get(name, {})
        return table
