"""Offers transformers for image models before plugins offer only the text model inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modulm.errors import ModulmError
from modulm.plugins import Choice, current, hookimpl

__all__ = ["modulm_choose_model"]


@hookimpl(tryfirst=True)
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """Choose transformers' code for models whose image encoders have no native plugin."""
    installed = {declared.name for declared in current().names("models")}
    if installed & set(architectures) or "vision_config" not in config:
        return None
    from modulm_transformers.config import TransformersConfig

    try:
        sees = TransformersConfig.from_table(config, "config.json").sees
    except ModulmError:
        return None
    reason = f"no plugin provides {architectures[0]}; runs with transformers' own code, slower"
    return Choice("transformers", reason) if sees else None
