"""The machine: platform, threads, memory nodes, and which plugins take part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later

__all__ = ["DeviceConfig"]


def _terms(value: Any) -> tuple[str, ...] | None:
    """`a,-b` and ["a", "-b"] alike."""
    items = [value] if isinstance(value, str) else list(value or ())
    terms = tuple(term.strip() for item in items for term in str(item).split(",") if term.strip())
    return terms or None


@frozen(kw_only=True, field_transformer=equip)
class DeviceConfig:
    """The machine: platform, threads, memory nodes, and which plugins take part."""

    TITLE: ClassVar[str] = "DeviceConfig"
    TABLE: ClassVar[str | None] = None

    device: str = flag(
        "auto", "Platform to run on; auto: the one with the best score.", kind="platforms",
        choices=("auto",),
    )  # fmt: skip
    cpu_threads: int | None = flag(
        None, "Threads that compute; None: all cores of this process.", unit="threads", least=1
    )
    numa_bind: bool = flag(
        False, "Bind threads and memory to one node.", state=later("binding to memory nodes")
    )
    numa_bind_nodes: tuple[int, ...] | None = flag(
        None, "Memory nodes to bind to.", state=later("binding to memory nodes")
    )
    numa_bind_cpus: tuple[str, ...] | None = flag(
        None, "Cores to bind to.", state=later("binding to memory nodes")
    )
    additional_config: Mapping[str, Any] = flag(
        {}, "Options of the platform.", state=later("options of platforms")
    )
    plugins: tuple[str, ...] | None = flag(
        None,
        "Plugins that take part, by name or distribution; None: all. -NAME leaves one out.",
        parse=_terms,
    )
    plugin_config: Mapping[str, Any] = flag(
        {},
        "Options of drivers: {kind: {name: {option: value}}}.",
        state=later("options of every kind; --attention-options and --quantization-config work"),
    )
