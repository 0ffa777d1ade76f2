"""MiniCPM-o 2.6: MiniCPM-V that hears by Whisper's encoder, in chunks of a second, of which each
attends to itself and to those before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size
from modulm_minicpm.v2 import MiniCPMV2Config, MiniCPMV2ForConditionalGeneration, MiniCPMV2Keys
from modulm_towers import (
    Pieces,
    WhisperTower,
    WhisperTowerConfig,
    tiny_audio,
    zero_key_biases,
)

__all__ = ["MiniCPMOConfig", "MiniCPMOForConditionalGeneration"]

#: Positions of the encoder in a second.
_POSITIONS = 50


@frozen(kw_only=True)
class _Keys(MiniCPMV2Keys):
    """audio_chunk_length: seconds of a chunk, 0 for no chunks. audio_pool_step: positions of a
    token.
    """

    audio_chunk_length: float = 1.0
    audio_pool_step: int = size(2)


@frozen(eq=False, kw_only=True)
class MiniCPMOConfig(MiniCPMV2Config):
    """config.json of MiniCPM-o: that of MiniCPM-V with `audio_config`."""

    top_level_type: ClassVar[type | None] = _Keys
    audio_type: ClassVar[type | None] = WhisperTowerConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        audio = table.get("audio_config")
        if not isinstance(audio, Mapping):
            raise CheckpointError(f"{file}: audio_config: must be a table")
        seen = super().from_table(table, file)
        return evolve(seen, audio=read_config(dict(audio), WhisperTowerConfig, file))


class MiniCPMOForConditionalGeneration(MiniCPMV2ForConditionalGeneration):
    """MiniCPM-o 2.6, of images and sounds; what speaks is not loaded."""

    config_type: ClassVar[type] = MiniCPMOConfig
    media = ("image", "audio")
    names: ClassVar[WeightNames] = evolve(
        MiniCPMV2ForConditionalGeneration.names,
        ignore=(r"^(audio_avg_pooler|tts)\.", r"^resampler\.(pos_embed|temporal_pos_embed)$"),
        rewrite=(
            *MiniCPMV2ForConditionalGeneration.names.rewrite,
            zero_key_biases(r"^apm\."),
        ),
    )

    def make_encoders(self, config: MiniCPMOConfig, b: Builder) -> None:
        super().make_encoders(config, b)
        chunk = int(config.top_level.audio_chunk_length * _POSITIONS)
        self.hearing = WhisperTower(config.audio, b.at("apm"), chunk=chunk)
        width, hidden = config.audio.d_model, config.hidden_size
        self.projector = PlainMLP(
            b.at("audio_projection_layer"), width, hidden, "relu", up="linear1", down="linear2",
            outputs=hidden,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        seen = [item for item in items if item.kind == "image"]
        images = iter((yield from super().features(seen)) if seen else ())
        sounds = {}
        for index, item in enumerate(items):
            if item.kind == "audio":
                sounds[index] = yield from self._hear(item)
        return [sounds[i] if i in sounds else next(images) for i in range(len(items))]

    def _hear(self, item: MediaItem) -> Pieces[Tensor]:
        """[tokens, hidden] of a sound, whose parts of 30 seconds are encoded apart."""
        mel = self.tensor(item, "audio_features")
        frames = item.tensors["audio_feature_lens"].reshape(-1).tolist()
        stems = [self.hearing.stem(part[None])[0] for part in mel.split(frames, dim=1)]
        lengths = [len(stem) for stem in stems]
        x = self.hearing.norm((yield from self.hearing.states(torch.cat(stems), lengths)))
        step = self.config.top_level.audio_pool_step
        projected = self.projector(x)
        pooled = [
            part[: len(part) // step * step].unflatten(0, (-1, step)).mean(1)
            for part in projected.split(lengths)
        ]
        return torch.cat(pooled)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["MiniCPMO"],
            "model_type": "minicpmo",
            "audio_chunk_length": 0.2,
            "audio_pool_step": 2,
            "audio_config": tiny_audio("whisper", max_source_positions=1500),
        }
