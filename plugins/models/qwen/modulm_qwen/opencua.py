"""OpenCUA (arXiv 2508.09123): Qwen2.5-VL's encoder before Qwen 2, with positions of one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.errors import CheckpointError
from modulm.nn import WeightNames, read_config
from modulm_qwen.vl import Qwen25VLForConditionalGeneration, QwenVLConfig
from modulm_towers import TextConfig, tiny_text

__all__ = ["OpenCuaConfig", "OpenCuaForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class OpenCuaConfig(QwenVLConfig):
    """config.json of OpenCUA."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = table.get("text_config"), table.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: text_config, vision_config: must be tables")
        return cls(
            text=TextConfig.from_table({**table, "text_config": _plain(text)}, file),
            vision=read_config(vision, cls.vision_type, file),
        )


def _plain(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's keys as Qwen 2's."""
    return {**text, "model_type": "qwen2"}


class OpenCuaForConditionalGeneration(Qwen25VLForConditionalGeneration):
    """OpenCUA 7B, 32B and 72B, of images."""

    prunes_videos = False
    config_type: ClassVar[type] = OpenCuaConfig
    axes = 1
    media = ("image",)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=((r"^vision_tower\.", "visual."), *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["OpenCUAForConditionalGeneration"],
            "model_type": "opencua",
            "media_placeholder_token_id": 480,
            "text_config": {**tiny_text("qwen2"), "tie_word_embeddings": False},
            "vision_config": dict(super().tiny()["vision_config"]),
        }
