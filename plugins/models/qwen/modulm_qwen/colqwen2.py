"""ColQwen2 (arXiv 2407.01449): a vector per token of a page or a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm_qwen.vl import Qwen2VLForConditionalGeneration, QwenVLConfig
from modulm_towers import TokenVectors, vlm_table

__all__ = ["ColQwen2Config", "ColQwen2ForRetrieval"]


@frozen(eq=False, kw_only=True)
class ColQwen2Config(QwenVLConfig):
    """config.json of ColQwen2; `vlm_config` is Qwen2-VL's. width: of the vectors."""

    width: int = 128

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        inner, width = vlm_table(table, "Qwen2VLForConditionalGeneration", file)
        return evolve(super().from_table(inner, file), width=width)


class ColQwen2ForRetrieval(TokenVectors, Qwen2VLForConditionalGeneration):
    """ColQwen2."""

    prunes_videos = False
    config_type: ClassVar[type] = ColQwen2Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        inner = {key: value for key, value in super().tiny().items() if key != "architectures"}
        return {
            "architectures": ["ColQwen2ForRetrieval"],
            "model_type": "colqwen2",
            "embedding_dim": 24,
            "vlm_config": inner,
        }
