"""Voxtral (arXiv 2507.13264): Whisper's encoder, four frames per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    WhisperTower,
    WhisperTowerConfig,
    stacked,
    tiny_text,
    zero_key_biases,
)

__all__ = ["VoxtralConfig", "VoxtralForConditionalGeneration"]


@frozen(kw_only=True)
class _Keys:
    projector_hidden_act: str = "gelu"


@frozen(eq=False, kw_only=True)
class VoxtralConfig(MultimodalConfig):
    """config.json of Voxtral; the encoder's inner width is that of the frames of one token."""

    audio_type: ClassVar[type | None] = WhisperTowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class VoxtralForConditionalGeneration(MultimodalModel):
    """Voxtral: sounds of any length, in windows of 30 seconds."""

    api = 1
    config_type: ClassVar[type] = VoxtralConfig
    media = ("audio",)
    names = WeightNames(rewrite=(zero_key_biases(),))

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = WhisperTower(config.audio, b.at("audio_tower"))
        self.projector = PlainMLP(
            b.at("multi_modal_projector"), config.audio.encoder_ffn_dim, config.hidden_size,
            config.top_level.projector_hidden_act, bias=False, up="linear_1", down="linear_2",
            outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        mel, windows = stacked(self, items, "input_features")
        states = yield from self.tower.run(mel)
        tokens = self.projector(states.reshape(-1, self.config.audio.encoder_ffn_dim))
        each = len(tokens) // len(mel)
        parts: Sequence[Tensor] = tokens.split([count * each for count in windows])
        return parts

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["VoxtralForConditionalGeneration"],
            "model_type": "voxtral",
            "audio_token_id": 480,
            "text_config": tiny_text("llama"),
            "audio_config": {
                "model_type": "voxtral_encoder",
                "num_mel_bins": 16,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "max_source_positions": 20,
            },
        }
