"""Ultravox: Whisper's encoder, eight frames per token, before a text model of any family.

Published files hold the projector, and the encoder where it was trained. They name the repositories
of the rest, whose files belong into the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Identity, Module

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import activation, size
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    WhisperTower,
    WhisperTowerConfig,
    through,
    tiny_audio,
    tiny_text,
    whisper_blocks,
    zero_key_biases,
)

__all__ = ["UltravoxConfig", "UltravoxModel"]

_EPS = 1e-6


@frozen(kw_only=True)
class _Keys:
    """hidden_size: inner width of the projector. stack_factor: frames of one token.
    num_projector_layers: blocks of Whisper in the projector, 0 for a feed-forward block.
    """

    hidden_size: int = size(4096)
    stack_factor: int = size(8)
    projector_act: str = "swiglu"
    projector_ln_mid: bool = False
    num_projector_layers: int = size(0, least=0)

    def __attrs_post_init__(self) -> None:
        if self.projector_act == "swiglu" and self.hidden_size % 2:
            raise ValueError("hidden_size: must be even")


@frozen(eq=False, kw_only=True)
class UltravoxConfig(MultimodalConfig):
    """config.json of Ultravox."""

    audio_type: ClassVar[type | None] = WhisperTowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        for part in ("text", "audio"):
            elsewhere = table.get(f"{part}_model_id")
            if elsewhere and not isinstance(table.get(f"{part}_config"), Mapping):
                raise UnsupportedError(
                    f"{file}: {part}_model_id: this model's files lack {elsewhere}: copy its "
                    f"*.safetensors beside them, and its config.json into {part}_config"
                )
            if not isinstance(table.get(f"{part}_config"), Mapping):
                raise CheckpointError(f"{file}: {part}_config: must be a table")
        return cls(
            text=TextConfig.from_table(table, file),
            audio=read_config(table["audio_config"], WhisperTowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class _Feed(Module):
    """Norm, layer, activation, layer and a norm before or after the last layer."""

    def __init__(self, c: UltravoxConfig, b: Builder) -> None:
        super().__init__()
        keys, hidden = c.top_level, c.hidden_size
        inputs, inner = c.audio.d_model * keys.stack_factor, keys.hidden_size
        self.gated = keys.projector_act == "swiglu"
        self.norm = b.rms_norm("ln_pre", inputs, _EPS)
        self.up = b.linear("linear_1", inputs, inner, split=False)
        self.act = Identity() if self.gated else activation(keys.projector_act, b.ops)
        inner = inner // 2 if self.gated else inner
        early = keys.projector_ln_mid
        self.middle = b.rms_norm("ln_mid", inner, _EPS) if early else Identity()
        self.down = b.linear("linear_2", inner, hidden, split=False)
        self.post = Identity() if early else b.rms_norm("ln_post", hidden, _EPS)

    def run(self, x: Tensor, counts: Sequence[int]) -> Pieces[Tensor]:
        """[tokens, stacked frames] -> [tokens, hidden]."""
        x = self.up(self.norm(x))
        if self.gated:
            value, gate = x.chunk(2, dim=-1)
            x = value * F.silu(gate)
        yield len(x)
        out: Tensor = self.post(self.down(self.middle(self.act(x)).contiguous()))
        return out


class _Blocks(Module):
    """Blocks of Whisper over the tokens of each window, with learned positions."""

    places: Tensor

    def __init__(self, c: UltravoxConfig, b: Builder) -> None:
        super().__init__()
        keys, width = c.top_level, c.audio.d_model
        inputs = width * keys.stack_factor
        self.norm = b.rms_norm("ln_pre", inputs, _EPS)
        self.input = b.linear("linear_in", inputs, width, bias=True, split=False)
        shape = (c.audio.max_source_positions, width)
        b.parameter("embed_positions.weight", self, "places", shape)
        self.layers = whisper_blocks(evolve(c.audio, encoder_layers=keys.num_projector_layers), b)
        self.post = b.rms_norm("ln_post", width, _EPS)
        self.output = b.linear("linear_out", width, c.hidden_size, bias=True, split=False)

    def run(self, x: Tensor, counts: Sequence[int]) -> Pieces[Tensor]:
        """[tokens of all windows, stacked frames] -> [tokens, hidden]."""
        x = self.input(self.norm(x)) + torch.cat([self.places[:count] for count in counts])
        x = yield from through(self.layers, x, list(counts))
        out: Tensor = self.output(self.post(x))
        return out


class UltravoxModel(MultimodalModel):
    """Ultravox: speech in windows of 30 seconds."""

    api = 1
    config_type: ClassVar[type] = UltravoxConfig
    media = ("audio",)
    names = WeightNames(
        rename=((r"^(?:audio_tower\.)?model\.encoder\.", "audio_tower."),),
        ignore=(
            r"^(audio_tower\.)?model\.decoder\.", r"^(audio_tower\.)?proj_out\.",
        ),
        rewrite=(zero_key_biases(r"^(audio_tower|multi_modal_projector)\."),),
    )  # fmt: skip

    def make_encoders(self, config: UltravoxConfig, b: Builder) -> None:
        self.tower = WhisperTower(config.audio, b.at("audio_tower"))
        deep = config.top_level.num_projector_layers > 0
        self.projector = (_Blocks if deep else _Feed)(config, b.at("multi_modal_projector"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        frames = [item.tensors["frames"].reshape(-1).tolist() for item in items]
        lengths = [(n - 1) // 2 + 1 for some in frames for n in some]
        stems = [self.tower.stem(self.tensor(item, "input_features")) for item in items]
        windows = [row for stem in stems for row in stem]
        rows = [row[:n] for row, n in zip(windows, lengths, strict=True)]
        x = self.tower.norm((yield from self.tower.states(torch.cat(rows), lengths)))
        stack = self.config.top_level.stack_factor
        padded = [F.pad(part, (0, 0, 0, -len(part) % stack)) for part in x.split(lengths)]
        counts = [len(part) // stack for part in padded]
        wide = torch.cat([part.reshape(-1, stack * part.shape[1]) for part in padded])
        tokens = yield from self.projector.run(wide, counts)
        per_window = iter(counts)
        return tokens.split([sum(next(per_window) for _ in some) for some in frames])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["UltravoxModel"],
            "model_type": "ultravox",
            "audio_token_index": 480,
            "hidden_size": 48,
            "stack_factor": 8,
            "projector_act": "swiglu",
            "projector_ln_mid": True,
            "text_config": {**tiny_text("llama"), "tie_word_embeddings": False},
            "audio_config": tiny_audio("whisper"),
        }
