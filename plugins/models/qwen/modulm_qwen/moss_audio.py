"""MOSS-Audio: an encoder of chunks before Qwen 3, whose inner layers the text model reads too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import GatedMLP, size
from modulm_qwen.hearing import Stem, thirds
from modulm_towers import (
    Convolution,
    DeepStack,
    MultimodalConfig,
    Pieces,
    TextConfig,
    Tower,
    WhisperTowerConfig,
    tiny_audio,
    tiny_text,
    whisper_blocks,
    zero_key_biases,
)

__all__ = ["MossAudioConfig", "MossAudioModel"]

_EPS = 1e-5
_CONVOLUTIONS = 3


@frozen(kw_only=True)
class _TowerConfig(WhisperTowerConfig):
    """`audio_config`. n_window: half the frames of a chunk. deepstack_encoder_layer_indexes: the
    layers whose outputs the text model reads.
    """

    num_mel_bins: int = size(128)
    output_dim: int = size(1280)
    downsample_rate: int = size(8)
    downsample_hidden_size: int = size(480)
    n_window: int = size(200)
    layer_norm_eps: float = _EPS
    deepstack_encoder_layer_indexes: tuple[int, ...] = (8, 16, 24)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.downsample_rate != 2**_CONVOLUTIONS or self.layer_norm_eps != _EPS:
            raise ValueError(f"downsample_rate: must be 8, and layer_norm_eps {_EPS}")
        if any(not 0 <= at < self.encoder_layers for at in self.deepstack_encoder_layer_indexes):
            raise ValueError("deepstack_encoder_layer_indexes: must be layers of the encoder")


@frozen(kw_only=True)
class _Keys:
    """adapter_hidden_size: inner width of what follows the encoder. deepstack_num_inject_layers:
    text layers that read inner layers at most, None for all.
    """

    adapter_hidden_size: int = size(8192)
    deepstack_num_inject_layers: int | None = size(None, least=0)


@frozen(eq=False, kw_only=True)
class MossAudioConfig(MultimodalConfig):
    """config.json of MOSS-Audio: `language_config` beside `audio_config`."""

    audio_type: ClassVar[type | None] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, audio = table.get("language_config"), table.get(cls.audio_key)
        if not isinstance(text, Mapping) or not isinstance(audio, Mapping):
            raise CheckpointError(f"{file}: language_config, {cls.audio_key}: must be tables")
        text = {**text, "model_type": "qwen3"}
        text.setdefault("tie_word_embeddings", table.get("tie_word_embeddings", False))
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            audio=read_config(audio, _TowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )

    @property
    def read(self) -> tuple[int, ...]:
        """The layers of the encoder that text layers read."""
        most = self.top_level.deepstack_num_inject_layers
        layers: tuple[int, ...] = self.audio.deepstack_encoder_layer_indexes
        return layers if most is None else layers[:most]


class _Tower(Stem, Tower):
    """Convolves and attends within chunks; eight frames per token, positions from 0 in each."""

    def __init__(self, c: _TowerConfig, read: Sequence[int], b: Builder) -> None:
        super().__init__()
        self.dtype, self.chunk, self.read = b.shared.dtype, 2 * c.n_window, tuple(read)
        wide = c.downsample_hidden_size
        self.convolutions = torch.nn.ModuleList(
            Convolution(b, f"conv{i + 1}", wide if i else 1, wide, (3, 3), stride=2, padding=1)
            for i in range(_CONVOLUTIONS)
        )
        inputs = wide * thirds(c.num_mel_bins)
        self.out_of_stem = b.linear("stem_proj", inputs, c.d_model, bias=True, split=False)
        self.layers = whisper_blocks(c, b)
        self.norm = b.layer_norm("layer_norm", c.d_model, _EPS)
        narrow = c.output_dim != c.d_model
        self.out = (
            b.linear("out_proj", c.d_model, c.output_dim, split=False)
            if narrow
            else torch.nn.Identity()
        )

    def run(self, sounds: Sequence[Tensor]) -> Pieces[tuple[list[Tensor], list[int]]]:
        """[bins, frames] of each sound -> ([tokens of all, outputs] of the last layer and of those
        that are read, tokens of each sound).
        """
        rows = [self.stem(mel) for mel in sounds]
        whole = thirds(self.chunk)
        lengths = [
            min(whole, len(row) - first) for row in rows for first in range(0, len(row), whole)
        ]
        x, inner = torch.cat(rows), {}
        for index, layer in enumerate(self.layers):
            x = layer(x, lengths)
            if index in self.read:
                inner[index] = self.out(x)
            yield len(x)
        return [self.out(self.norm(x)), *(inner[at] for at in self.read)], [len(r) for r in rows]


class MossAudioModel(DeepStack):
    """MOSS-Audio 4B and 8B: speech, sounds and music, with the time between tokens."""

    api = 1
    config_type: ClassVar[type] = MossAudioConfig
    media = ("audio",)
    names = WeightNames(
        rename=((r"^language_model\.(?!model\.|lm_head\.)", "model."),),
        ignore=(r"^audio_encoder\.embed_positions\.",),
        rewrite=(zero_key_biases(r"^audio_encoder\."),),
    )

    def make_encoders(self, config: MossAudioConfig, b: Builder) -> None:
        inputs, inner = config.audio.output_dim, config.top_level.adapter_hidden_size
        self.tower = _Tower(config.audio, config.read, b.at("audio_encoder"))
        places = ["audio_adapter"]
        places += [f"deepstack_audio_merger_list.{i}" for i in range(len(config.read))]
        self.adapters = torch.nn.ModuleList(
            GatedMLP(b.at(at), inputs, inner, outputs=config.hidden_size) for at in places
        )
        self.inject(len(config.read))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        sounds = [self.tensor(item, "input_features") for item in items]
        states, counts = yield from self.tower.run(sounds)
        levels = [adapter(x) for adapter, x in zip(self.adapters, states, strict=True)]
        tokens: Sequence[Tensor] = torch.cat(levels, dim=-1).split(counts)
        return tokens

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        audio = tiny_audio(
            "moss_audio_encoder", output_dim=24, n_window=16, downsample_hidden_size=8,
            deepstack_encoder_layer_indexes=[0, 1],
        )  # fmt: skip
        return {
            "architectures": ["MossAudioModel"],
            "model_type": "moss_audio",
            "adapter_hidden_size": 40,
            "language_config": {**tiny_text("qwen3", head_dim=16), "tie_word_embeddings": False},
            "audio_config": audio,
        }
