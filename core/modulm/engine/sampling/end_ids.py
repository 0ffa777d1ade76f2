"""The tokens that end a sequence, as a configuration and the files of a checkpoint have them."""

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
    """End-of-sequence ids: of `--override-generation-config`, else of generation_config.json, else
    of config.json. Raises ConfigError if they are no ids.
    """
    tables = (config.model.override_generation_config, generation_config, model_config)
    found = next((table[_ENDS] for table in tables if table.get(_ENDS) is not None), ())
    ids = tuple(found) if isinstance(found, list | tuple) else (found,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError("override_generation_config", f"eos_token_id must be ids, not {found!r}")
    return ids
