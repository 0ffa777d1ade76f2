"""Checkpoints for images and sound are answered with their text model, where it is native."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modulm.plugins import Choice, current, hookimpl
from modulm_towers import text_architecture

__all__ = ["modulm_choose_model"]


@hookimpl
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """The text model alone, unless a plugin offers the whole."""
    installed = {declared.name for declared in current().names("models")}
    text = text_architecture(config)
    if installed & set(architectures) or text not in installed:
        return None
    reason = f"the text model of {architectures[0]} is {text}; images and sound are not read"
    return Choice("multimodal_text", reason)
