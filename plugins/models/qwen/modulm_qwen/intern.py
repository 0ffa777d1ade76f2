"""Intern-S2 Preview: Qwen3.5 with experts, whose encoder of time series is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.nn import WeightNames
from modulm_qwen.vl import Qwen35MoeForConditionalGeneration, QwenVLConfig

__all__ = ["InternS2PreviewConfig", "InternS2PreviewForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class InternS2PreviewConfig(QwenVLConfig):
    """config.json of Intern-S2 Preview: Qwen3.5's keys under a model type of its own."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        name, kind = "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"
        parts = {
            "text_config": {**(table.get("text_config") or {}), "model_type": f"{kind}_text"},
            "vision_config": {**(table.get("vision_config") or {}), "model_type": kind},
        }
        return super().from_table(
            {**table, **parts, "architectures": [name], "model_type": kind}, file
        )


class InternS2PreviewForConditionalGeneration(Qwen35MoeForConditionalGeneration):
    """Intern-S2 Preview, of images and videos."""

    config_type: ClassVar[type] = InternS2PreviewConfig

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, ignore=(r"^(model\.)?time_series\.", *names.ignore))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {
            "architectures": ["InternS2PreviewForConditionalGeneration"],
            "model_type": "interns2_preview",
        }
        return {**super().tiny(), **names}
