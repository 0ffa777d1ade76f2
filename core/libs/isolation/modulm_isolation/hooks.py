"""Hook plugin that refuses an `--isolate` that this process does not follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm import plugins
from modulm.errors import ConfigError
from modulm.plugins import hookimpl
from modulm_isolation.flags import IsolationConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_config_final"]


@hookimpl(tryfirst=True)
def modulm_config_final(config: EngineConfig) -> None:
    """Raise ConfigError if packages of `isolate` are not isolated in this process.

    Plugins are selected before an engine's configuration exists.
    """
    active = plugins.current().selection.isolate
    missing = [term for term in config.group(IsolationConfig).isolate if term not in active]
    if missing:
        terms = ",".join(f"~{term}" for term in missing)
        raise ConfigError(
            "isolate",
            "is fixed for the process; before the engine is created, call "
            f"modulm.plugins.configure({terms!r}), or set MODULM_PLUGINS",
        )
