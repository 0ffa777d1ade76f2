"""Keye-VL 1 and 1.5 (arXiv 2507.01949, 2509.01563): SigLIP for images of any size, before Qwen 3.

Videos are not supported yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import frozen

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm_layers import tiny_config
from modulm_towers import (
    MultimodalConfig,
    NavitConfig,
    NavitModel,
    TextConfig,
)

__all__ = ["KeyeConfig", "KeyeForConditionalGeneration", "KeyeVL15ForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class KeyeConfig(MultimodalConfig):
    """config.json of Keye-VL: Qwen 3's keys beside `vision_config`."""

    vision_type: ClassVar[type] = NavitConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        text = {k: v for k, v in table.items() if k not in ("vision_config", "text_config")}
        text |= {**(table.get("text_config") or {}), "model_type": "qwen3"}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file, cls.text_ignored),
            vision=read_config(vision, cls.vision_type, file),
        )


class KeyeForConditionalGeneration(NavitModel):
    """Keye-VL 8B."""

    api = 1
    config_type: ClassVar[type] = KeyeConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        return {
            **tiny_config("qwen3", "KeyeForConditionalGeneration", head_dim=16),
            "model_type": "Keye",
            "image_token_id": 480,
            "rope_parameters": rope,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        }


class KeyeVL15ForConditionalGeneration(KeyeForConditionalGeneration):
    """Keye-VL 1.5 8B."""

    whole_squares = True

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {
            "architectures": ["KeyeVL1_5ForConditionalGeneration"],
            "model_type": "KeyeVL1_5",
        }
        return {**super().tiny(), **names}
