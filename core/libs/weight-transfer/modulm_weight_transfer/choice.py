"""Choose the backend that `--weight-transfer-config` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, PluginNotFound
from modulm.plugins import manager
from modulm_weight_transfer.flags import WeightTransferFlags

if TYPE_CHECKING:
    from modulm_weight_transfer.contract import WeightTransferBackend

__all__ = ["chosen_backend"]


def chosen_backend(config: Any) -> tuple[type[WeightTransferBackend], Any] | None:
    """Return the backend class and its options; None without the flag.

    Raises ConfigError for an unknown backend or unknown options.
    """
    table = dict(config.group(WeightTransferFlags).weight_transfer_config)
    if not table:
        return None
    name = table.pop("backend")
    try:
        return manager.current().configured("weight_transfer", {"weight_transfer": {name: table}})
    except PluginNotFound as error:
        raise ConfigError("weight_transfer_config", f"backend: {error}") from error
