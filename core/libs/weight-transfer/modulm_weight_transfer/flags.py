"""The flag of weight updates, by vLLM's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group, read_mapping
from modulm.errors import ConfigError

__all__ = ["WeightTransferFlags"]


def _transfer(value: Any) -> Mapping[str, Any]:
    """Validate a table with a backend's name. Raises ConfigError."""
    table = read_mapping("weight_transfer_config", value)
    if table and not isinstance(table.get("backend"), str):
        raise ConfigError("weight_transfer_config", "backend: must be the name of a backend")
    return table


@flag_group
class WeightTransferFlags(FlagGroup):
    """How the weights of a running engine are updated."""

    title = "WeightTransferConfig"

    weight_transfer_config: Mapping[str, Any] = flag(
        {},
        "How the engine receives weights from a trainer: `backend` (an installed driver) and its "
        "options.",
        parse=_transfer,
    )
