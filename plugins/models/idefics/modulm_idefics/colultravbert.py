"""ColUltraVBERT: SigLIP before UltraBERT, whose hidden states are vectors of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen
from torch.nn import Identity, Sequential

from modulm.nn import Builder, WeightNames
from modulm_idefics.colmodernvbert import ModernVBertModel
from modulm_idefics.idefics3 import Idefics3Config
from modulm_layers import size
from modulm_towers import TokenVectors, tiny_text

__all__ = ["ColUltraVBertConfig", "ColUltraVBertForRetrieval"]


@frozen(kw_only=True)
class _Keys:
    """connector_norm: whether tokens of images are normalized."""

    pixel_shuffle_factor: int = size(4)
    connector_norm: bool = True


@frozen(eq=False, kw_only=True)
class ColUltraVBertConfig(Idefics3Config):
    """config.json of ColUltraVBERT."""

    top_level_type: ClassVar[type | None] = _Keys

    width: None = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text = {**(table.get("text_config") or {}), "model_type": "ultrabert"}
        names = {"architectures": ["UltraVBertModel"], "model_type": "ultravbert"}
        return super().from_table(
            {**table, **names, "text_config": text, "tie_word_embeddings": True}, file
        )


class ColUltraVBertForRetrieval(TokenVectors, ModernVBertModel):
    """ColUltraVBERT; all tokens of a prompt attend to each other."""

    config_type: ClassVar[type] = ColUltraVBertConfig

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)
        eps = config.text.text.rms_norm_eps
        norm = b.rms_norm("connector.norm", config.hidden_size, eps)
        self.projector = Sequential(
            self.projector, norm if config.top_level.connector_norm else Identity()
        )

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=((r"^text_model\.", "model.text_model."), *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        vision = {**super().tiny()["vision_config"], "model_type": "siglip_vision_model"}
        return {
            "architectures": ["ColUltraVBertForRetrieval"],
            "model_type": "ultravbert",
            "image_token_id": 480,
            "pixel_shuffle_factor": 2,
            "text_config": tiny_text("ultrabert", sliding_window=8),
            "vision_config": vision,
        }
