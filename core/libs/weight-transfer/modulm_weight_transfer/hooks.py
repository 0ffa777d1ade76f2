"""The hook that checks `--weight-transfer-config` before a model is loaded."""

from __future__ import annotations

from typing import Any

from modulm.plugins import hookimpl
from modulm_weight_transfer.choice import chosen_backend

__all__ = ["modulm_config_final"]


@hookimpl
def modulm_config_final(config: Any) -> None:
    """Raise ConfigError for a backend that is not installed, or for unknown options."""
    chosen_backend(config)
