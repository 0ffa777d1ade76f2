"""Names of classes and types in published files, and those of the transformers library.

A server's front end imports this module, so it imports nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["class_name", "model_type"]

#: Names in published files -> those of transformers' classes, which read these files.
_CLASSES = {"HCXVisionV2ForCausalLM": "HyperCLOVAXVisionV2ForConditionalGeneration"}
_TYPES = {"vlm": "hyperclovax_vision_v2"}


def class_name(architecture: str) -> str:
    """Return the name of transformers' class for an architecture of config.json."""
    return _CLASSES.get(architecture, architecture)


def model_type(table: Mapping[str, Any]) -> str:
    """Return the model type of config.json by transformers' name."""
    name = str(table.get("model_type"))
    return _TYPES.get(name, name)
