"""Hook plugin that checks `--plugins-lock` in every engine's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins import hookimpl
from modulm_plugin_lock.flags import PluginLockConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_config_final"]


@hookimpl(tryfirst=True)
def modulm_config_final(config: EngineConfig) -> None:
    """Raise ConfigError if this environment or the configuration differs from the lock."""
    path = config.group(PluginLockConfig).plugins_lock
    if path is not None:
        from modulm_plugin_lock.lock import check_config, check_packages

        check_packages(path)
        check_config(path, config)
