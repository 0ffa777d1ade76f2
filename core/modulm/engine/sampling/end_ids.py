"""End-of-sequence tokens from the configuration and the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["end_ids"]

_ENDS = "eos_token_id"


def end_ids(
    config: EngineConfig, generation_config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the end-of-sequence ids.

    The first of `--override-generation-config`, generation_config.json and config.json that has
    them wins. Raises ConfigError if they are not token ids.
    """
    tables = (config.model.override_generation_config, generation_config, model_config)
    value = next((table[_ENDS] for table in tables if table.get(_ENDS) is not None), ())
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError("override_generation_config", f"eos_token_id must be ids, not {value!r}")
    return ids
