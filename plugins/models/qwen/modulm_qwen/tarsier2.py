"""Tarsier 2 (arXiv 2501.07888): Qwen2-VL in files with LLaVA's keys and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.nn import WeightNames
from modulm_qwen.qwen_media_family import as_qwen2_vl
from modulm_qwen.vl import Qwen2VLForConditionalGeneration, QwenVLConfig

__all__ = ["Tarsier2Config", "Tarsier2ForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class Tarsier2Config(QwenVLConfig):
    """config.json of Tarsier 2: `text_config` and `vision_config` are Qwen2-VL's."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        return super().from_table(as_qwen2_vl(table), file)


class Tarsier2ForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Tarsier 2."""

    config_type: ClassVar[type] = Tarsier2Config

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=((r"^vision_tower\.", "visual."), *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = dict(super().tiny())
        for key in [key for key in table if key.endswith("_token_id")]:
            del table[key]
        text = {**table.pop("text_config"), "image_token_id": 480, "video_token_id": 481}
        table["vision_config"] = {**table["vision_config"], "model_type": "qwen2_vl"}
        names = {"architectures": ["Tarsier2ForConditionalGeneration"], "model_type": "llava"}
        return {**table, **names, "text_config": {**text, "model_type": "qwen2_vl"}}
