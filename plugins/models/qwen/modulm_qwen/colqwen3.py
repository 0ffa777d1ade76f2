"""ColQwen 3, 3.5 and Nemotron ColEmbed (arXiv 2407.01449): vectors by Qwen3-VL and Qwen3.5.

Files of several authors differ in names: the width of the vectors, the layer that makes them, and
whether the model around it has a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.errors import CheckpointError
from modulm.nn import WeightNames
from modulm_qwen.vl import (
    Qwen3VLForConditionalGeneration,
    Qwen35ForConditionalGeneration,
    QwenVLConfig,
)
from modulm_towers import TokenVectors

__all__ = [
    "ColQwen3",
    "ColQwen3Config",
    "ColQwen35",
    "ColQwen35Config",
    "Qwen3VLNemotronEmbedConfig",
    "Qwen3VLNemotronEmbedModel",
]

#: What files call the width of the vectors.
_WIDTHS = ("embed_dim", "dims", "dim", "embedding_dim", "projection_dim", "colbert_dim")


@frozen(eq=False, kw_only=True)
class ColQwen3Config(QwenVLConfig):
    """config.json of ColQwen 3: Qwen3-VL's keys, or a table of them. width: of the vectors."""

    around: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    model_type: ClassVar[str] = "qwen3_vl"
    #: Whether a layer makes the vectors.
    projects: ClassVar[bool] = True

    width: int | None = 128

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        widths = {table[key] for key in _WIDTHS if table.get(key) is not None}
        width = widths.pop() if len(widths) == 1 else None
        if (type(width) is not int or width < 1) if cls.projects else (width is not None or widths):
            expected = "the width of the vectors is" if cls.projects else "no width is"
            raise CheckpointError(f"{file}: embed_dim: {expected} expected")
        inner = {key: value for key, value in table.items() if key not in _WIDTHS}
        inner |= dict(table.get("vlm_config") or {})
        names = {"architectures": [cls.around], "model_type": cls.model_type}
        config = super().from_table({**inner, **names, "tie_word_embeddings": True}, file)
        return evolve(config, width=width)


@frozen(eq=False, kw_only=True)
class Qwen3VLNemotronEmbedConfig(ColQwen3Config):
    """config.json of Nemotron ColEmbed. Its vectors are the text model's, of that width."""

    projects = False


@frozen(eq=False, kw_only=True)
class ColQwen35Config(ColQwen3Config):
    """config.json of ColQwen 3.5."""

    around = "Qwen3_5ForConditionalGeneration"
    model_type = "qwen3_5"


class _Named(TokenVectors):
    """Reads the names of all authors' files."""

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        rename = (
            (
                r"^(?:model\.|vlm\.)?(?:custom_text_proj|embedding_proj_layer)\.",
                f"{cls.projection}.",
            ),
            (r"^language_model\.(?!model\.|lm_head\.)", "model.language_model."),
        )
        ignore = (r"(^|\.)lm_head\.", *names.ignore)
        return evolve(names, rename=(*rename, *names.rename), ignore=ignore)


class ColQwen3(_Named, Qwen3VLForConditionalGeneration):
    """ColQwen 3, by TomoroAI and OpenSearch-AI."""

    config_type: ClassVar[type] = ColQwen3Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["ColQwen3"], "model_type": "colqwen3"}
        return {**super().tiny(), **names, "embed_dim": 24}


class Qwen3VLNemotronEmbedModel(ColQwen3):
    """Nemotron ColEmbed 2: Qwen3-VL's hidden states are the vectors."""

    config_type = Qwen3VLNemotronEmbedConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {
            "architectures": ["Qwen3VLNemotronEmbedModel"],
            "model_type": "qwen3_vl_nemotron_embed",
        }
        return {**Qwen3VLForConditionalGeneration.tiny(), **names}


class ColQwen35(_Named, Qwen35ForConditionalGeneration):
    """ColQwen 3.5."""

    config_type: ClassVar[type] = ColQwen35Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["ColQwen3_5"], "model_type": "colqwen3_5"}
        return {**super().tiny(), **names, "dim": 24}
