"""Qwen2-Audio (arXiv 2407.10759), Audio Flamingo 3 (arXiv 2507.08128) and Music Flamingo (arXiv
2511.10289): Whisper's encoder with two frames per token, before Qwen 2. MOSS-Transcribe-Diarize:
before Qwen 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, size
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

__all__ = [
    "AudioFlamingo3ForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
]


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


@frozen(kw_only=True)
class _Timed(_Projector):
    """audio_frame_step: seconds per frame of the spectrogram. rope_parameters: of the rotation."""

    audio_frame_step: float = 0.01
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.rope_parameters.get("rope_type", "default") != "default":
            raise ValueError("rope_parameters: not supported yet: scaled positions")


@frozen(eq=False, kw_only=True)
class MusicFlamingoConfig(Qwen2AudioConfig):
    """config.json of Music Flamingo."""

    top_level_type: ClassVar[type | None] = _Timed


class MusicFlamingoForConditionalGeneration(AudioFlamingo3ForConditionalGeneration):
    """Music Flamingo: Audio Flamingo 3 whose tokens are rotated by their window and time."""

    config_type = MusicFlamingoConfig

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        mel, _ = stacked(self, items, "input_features")
        frames = [item.tensors[self.mask].sum(-1).tolist() for item in items]
        states = yield from encode_sounds(self.tower, mel, [n for some in frames for n in some])
        counts = [[((n - 1) // 2 + 1) // 2 for n in some] for some in frames]
        whole = ((mel.shape[-1] - 1) // 2 + 1) // 2
        angles = [
            self._angles(window, count, whole)
            for some in counts
            for window, count in enumerate(some)
        ]
        tokens: Tensor = self.projector(_turned(states, torch.cat(angles)))
        return tokens.split([sum(some) for some in counts])

    def _angles(self, window: int, count: int, whole: int) -> Tensor:
        """[count, pairs] of the tokens of a window; whole: tokens of a full window."""
        keys = self.config.top_level
        rope, step = keys.rope_parameters, 4 * keys.audio_frame_step
        theta = float(rope.get("rope_theta", 1200.0))
        width = int(self.config.audio.d_model * float(rope.get("partial_rotary_factor", 0.2)))
        waves = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        at = torch.arange(count, dtype=torch.float32)
        of_time = (at / theta * (2 * math.pi))[:, None] * waves
        of_window = (torch.tensor(float(window)) / theta * waves).expand_as(of_time)
        seconds = torch.tensor(window) * whole * step + at * step
        return torch.cat([of_window, of_time], dim=-1) * (-seconds * 2 * math.pi)[:, None]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["MusicFlamingoForConditionalGeneration"],
            "model_type": "musicflamingo",
            "audio_bos_token_id": 481,
            "audio_eos_token_id": 482,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1200.0, "partial_rotary_factor": 0.25,
            },
        }  # fmt: skip


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first pairs of columns of x: [tokens, width]; angles: [tokens, pairs]."""
    pairs = x[:, : 2 * angles.shape[1]].double().unflatten(-1, (-1, 2))
    cosines, sines = angles.cos().double().to(x.device), angles.sin().double().to(x.device)
    one, two = pairs.unbind(-1)
    turned = torch.stack([one * cosines - two * sines, two * cosines + one * sines], dim=-1)
    return torch.cat([turned.flatten(1).to(x.dtype), x[:, 2 * angles.shape[1] :]], dim=-1)


@frozen(kw_only=True)
class _Merged(_Projector):
    """audio_merge_size: frames of the encoder that one token is made of."""

    audio_merge_size: int = size(4)


@frozen(eq=False, kw_only=True)
class MossConfig(Qwen2AudioConfig):
    """config.json of MOSS-Transcribe-Diarize."""

    top_level_type: ClassVar[type | None] = _Merged


class MossTranscribeDiarizeForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """MOSS-Transcribe-Diarize: four frames per token, the time in seconds between tokens."""

    config_type = MossConfig

    def make_encoders(self, config: Any, b: Builder) -> None:
        keys, at, hidden = config.top_level, b.at("multi_modal_projector"), config.hidden_size
        self.tower = WhisperTower(config.audio, b.at("audio_tower"))
        self.projector = PlainMLP(
            at, keys.audio_merge_size * config.audio.d_model, hidden, keys.projector_hidden_act,
            bias=keys.projector_bias, up="linear_1", down="linear_2", outputs=hidden,
        )  # fmt: skip
        self.norm = at.layer_norm("norm", hidden, config.text.text.rms_norm_eps)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        mel, windows = stacked(self, items, "input_features")
        states = yield from self.tower.run(mel)
        merge, embeddings = self.config.top_level.audio_merge_size, []
        for item, rows in zip(items, states.split(windows), strict=True):
            frames = item.tensors["input_features_mask"].reshape(len(rows), -1).sum(-1).tolist()
            counts = [-(-((n - 1) // 2 + 1) // merge) * merge for n in frames]
            kept = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
            tokens: Tensor = self.norm(self.projector(kept.reshape(-1, merge * kept.shape[1])))
            embeddings.append(tokens)
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["MossTranscribeDiarizeForConditionalGeneration"],
            "model_type": "moss_transcribe_diarize",
            "audio_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text("qwen3", head_dim=16),
            "audio_config": tiny_audio("moss_transcribe_diarize_audio", max_source_positions=100),
        }
