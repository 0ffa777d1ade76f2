"""ColModernVBERT (arXiv 2510.01149): SigLIP before ModernBERT, with a vector per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.nn import Builder, WeightNames
from modulm_idefics.idefics3 import Idefics3Config, Idefics3ForConditionalGeneration
from modulm_layers import size
from modulm_towers import ClipTower, TokenVectors, flat_patches, tiny_text, vlm_table

__all__ = ["ColModernVBertConfig", "ColModernVBertForRetrieval", "ModernVBertModel"]


@frozen(kw_only=True)
class _Keys:
    """pixel_shuffle_factor: the side of squares of patches that become one token."""

    pixel_shuffle_factor: int = size(4)


@frozen(eq=False, kw_only=True)
class ColModernVBertConfig(Idefics3Config):
    """config.json of ColModernVBERT; `vlm_config` is that of the rest. width: of vectors."""

    top_level_type: ClassVar[type | None] = _Keys
    #: Class names, if the file has none.
    text_ignored = ("id2label",)

    width: int = 128

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        name = "ModernVBertModel"
        if "vlm_config" not in table:  # The merged files have the model's keys at the top.
            table = {"vlm_config": table, "embedding_dim": table.get("embedding_dim", 128)}
        inner, width = vlm_table(table, name, file)
        return evolve(super().from_table(inner, file), width=width)


class ModernVBertModel(Idefics3ForConditionalGeneration):
    """Idefics' vision encoder before a text encoder."""

    names = WeightNames(
        rename=((r"^vision_model\.vision_model\.", "vision_model."),),
        ignore=(r"^vision_model\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = ClipTower(config.vision, b.at("vision_model"))
        inputs = config.vision.hidden_size * self._scale**2
        name = "connector.modality_projection"
        self.projector = b.linear(name, inputs, config.hidden_size, split=False)

    @property
    def _scale(self) -> int:
        scale: int = self.config.top_level.pixel_shuffle_factor
        return scale


class ColModernVBertForRetrieval(TokenVectors, ModernVBertModel):
    """ColModernVBERT; all tokens of a prompt attend to each other."""

    config_type: ClassVar[type] = ColModernVBertConfig

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        merged = (r"^(?:model\.)?custom_text_proj\.", f"{cls.projection}.")
        return evolve(names, rename=(merged, *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        like = super().tiny()
        special = {f"{name}_token_id": 2 for name in ("pad", "bos", "eos", "cls", "sep")}
        text = {**tiny_text("modernbert", local_attention=8), **special}
        text.pop("num_key_value_heads")
        return {
            "architectures": ["ColModernVBertForRetrieval"],
            "model_type": "colmodernvbert",
            "embedding_dim": 24,
            "vlm_config": {
                "model_type": "modernvbert",
                "image_token_id": 480,
                "pixel_shuffle_factor": 2,
                "text_config": text,
                "vision_config": {**like["vision_config"], "model_type": "siglip_vision_model"},
            },
        }
