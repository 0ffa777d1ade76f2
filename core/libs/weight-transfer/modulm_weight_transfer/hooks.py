"""Hooks that check `--weight-transfer-config` before a model is loaded, and that load a model again
with fewer copies.
"""

from __future__ import annotations

from typing import Any

from modulm.plugins import hookimpl
from modulm_weight_transfer.choice import chosen_backend

__all__ = ["modulm_config_final", "modulm_model_built"]


@hookimpl
def modulm_config_final(config: Any) -> None:
    """Raise ConfigError for a backend that is not installed, or for unknown options."""
    chosen_backend(config)


@hookimpl(trylast=True)
def modulm_model_built(config: Any, fillers: list[Any]) -> None:
    """Fill models that wake up without copies of their layers, unless another filler does."""
    from modulm_weight_transfer.direct import fill_directly, was_released

    if was_released(config):
        fillers.append(fill_directly)
