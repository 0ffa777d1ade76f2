"""Qwen2-Audio (arXiv 2407.10759) and Audio Flamingo 3 (arXiv 2507.08128): Whisper's encoder with
two frames per token, before Qwen 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    WhisperTower,
    WhisperTowerConfig,
    encode_sounds,
    stacked,
    tiny_audio,
    tiny_text,
    zero_key_biases,
)

__all__ = ["AudioFlamingo3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class Qwen2AudioConfig(MultimodalConfig):
    """config.json of Qwen2-Audio."""

    audio_type: ClassVar[type | None] = WhisperTowerConfig


class Qwen2AudioForConditionalGeneration(MultimodalModel):
    """Qwen2-Audio: sounds of up to 30 seconds."""

    api = 1
    config_type: ClassVar[type] = Qwen2AudioConfig
    media = ("audio",)
    names = WeightNames(rewrite=(zero_key_biases(),))
    #: Name of the tensor with the numbers of unpadded frames.
    mask: ClassVar[str] = "feature_attention_mask"
    projector: Module

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = WhisperTower(config.audio, b.at("audio_tower"))
        width = config.audio.d_model
        self.projector = b.linear(
            "multi_modal_projector.linear", width, config.hidden_size, bias=True, split=False
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        mel, _ = stacked(self, items, "input_features")
        frames = [item.tensors[self.mask].sum(-1).tolist() for item in items]
        states = yield from encode_sounds(self.tower, mel, [n for some in frames for n in some])
        tokens: Tensor = self.projector(states)
        return tokens.split([sum(((n - 1) // 2 + 1) // 2 for n in some) for some in frames])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "audio_token_index": 480,
            "text_config": tiny_text("qwen2"),
            "audio_config": tiny_audio("qwen2_audio_encoder"),
        }


@frozen(kw_only=True)
class _Projector:
    projector_hidden_act: str = "gelu"
    projector_bias: bool = True


@frozen(eq=False, kw_only=True)
class AudioFlamingo3Config(Qwen2AudioConfig):
    """config.json of Audio Flamingo 3."""

    top_level_type: ClassVar[type | None] = _Projector


class AudioFlamingo3ForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Audio Flamingo 3: sounds of up to ten minutes, in windows of 30 seconds."""

    config_type = AudioFlamingo3Config
    mask = "input_features_mask"

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = WhisperTower(config.audio, b.at("audio_tower"))
        self.projector = PlainMLP(
            b.at("multi_modal_projector"), config.audio.d_model, config.hidden_size,
            config.top_level.projector_hidden_act, bias=config.top_level.projector_bias,
            up="linear_1", down="linear_2", outputs=config.hidden_size,
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["AudioFlamingo3ForConditionalGeneration"],
            "model_type": "audioflamingo3",
            "audio_token_id": 480,
            "text_config": tiny_text("qwen2"),
            "audio_config": tiny_audio("audioflamingo3_encoder"),
        }
