"""Sampling defaults for fields that a request omits.

They come from the checkpoint's generation_config.json and from `--override-generation-config`; both
use the names of transformers' GenerationConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import CheckpointError, ConfigError
from modulm_frontend.validation import problem

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["sampling_defaults"]

#: Name in generation_config.json -> field of SamplingParams.
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_ENDS = "eos_token_id"


def sampling_defaults(config: EngineConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults by field of SamplingParams, checked.

    generation_config: the checkpoint's; `--generation-config` may name another folder, or none
    ("vllm", "modulm"). Raises ConfigError, or CheckpointError for a wrong value in the file.
    """
    source = config.model.generation_config
    table: Mapping[str, Any] = {}
    if source == "auto":
        table = generation_config
    elif source not in ("vllm", "modulm"):
        table = _read(source)
    defaults = {
        ours: table[theirs] for theirs, ours in _FIELDS.items() if table.get(theirs) is not None
    }
    for name, value in defaults.items():
        message = problem(name, value)
        if message is not None:
            raise CheckpointError(
                f"generation_config.json: {name} {message}, not {value!r:.40}; replace it with "
                "--override-generation-config or leave the file out with --generation-config vllm"
            )
    return defaults | _overrides(config.model.override_generation_config)


def _overrides(table: Mapping[str, Any]) -> dict[str, Any]:
    where = "override_generation_config"
    unknown = sorted(set(table) - set(_FIELDS) - {_ENDS})
    if unknown:
        raise ConfigError(where, f"{unknown[0]!r} is not one of {', '.join((*_FIELDS, _ENDS))}")
    overrides = {_FIELDS[name]: value for name, value in table.items() if name in _FIELDS}
    for name, value in overrides.items():
        message = problem(name, value)
        if message is not None:
            raise ConfigError(where, f"{name} {message}, not {value!r:.40}")
    return overrides


def _read(folder: str) -> Mapping[str, Any]:
    file = Path(folder).expanduser() / "generation_config.json"
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("generation_config", f"{file}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError("generation_config", f"{file}: a JSON object is required")
    return table
