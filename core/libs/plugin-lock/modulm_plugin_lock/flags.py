"""The flag `--plugins-lock`."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["PluginLockConfig"]


@flag_group
class PluginLockConfig(FlagGroup):
    """The plugins that a start requires."""

    title = "PluginLockConfig"

    plugins_lock: str | None = flag(
        None,
        "Lock file of `modulm plugins lock`; the start is refused if the installed plugins, their "
        "files, `--plugins` or `--plugin-config` differ from it.",
        unit="path",
    )
