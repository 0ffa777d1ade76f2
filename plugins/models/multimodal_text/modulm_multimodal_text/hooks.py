"""Runs multimodal checkpoints with their text model, if that is native.

Every process loads this file: what it needs for such checkpoints, and torch with it, is imported
when one is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modulm.config import EngineConfig
from modulm.contracts.model import Model
from modulm.errors import ConfigError
from modulm.plugins import Choice, current, hookimpl
from modulm_media.flags import MediaConfig

__all__ = ["modulm_choose_model", "modulm_model_built"]


@hookimpl
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """Choose the text model, unless a plugin provides the complete model."""
    installed = {declared.name for declared in current().names("models")}
    if installed & set(architectures):
        return None
    from modulm_towers import text_architecture

    text = text_architecture(config)
    if text not in installed:
        return None
    reason = f"the text model of {architectures[0]} is {text}; images and audio are not supported"
    return Choice("multimodal_text", reason)


@hookimpl
def modulm_model_built(model: Model, config: EngineConfig) -> None:
    """Raise ConfigError if encoder settings were requested for a model without encoders."""
    if not config.group(MediaConfig).mm_encoder_only:
        return
    from modulm_towers import MultimodalModel

    if not isinstance(model, MultimodalModel):
        who = type(model).__name__
        raise ConfigError("mm_encoder_only", f"{who} has no encoder of media before a text model")
