"""GLM-ASR: Whisper's convolutions, blocks with rotary positions, four frames per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import AttentionNames, PlainMLP, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    stacked,
    through,
    tiny_text,
    zero_key_biases,
)

__all__ = ["GlmAsrConfig", "GlmAsrForConditionalGeneration"]

#: Encoder frames that one token is made of.
_MERGED = 4
_EPS = 1e-5
_NAMES = BlockNames(
    norm1="input_layernorm",
    projections=AttentionNames("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    norm2="post_attention_layernorm",
)


@frozen(kw_only=True)
class _TowerConfig:
    """`audio_config`."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    num_mel_bins: int = size(128)
    hidden_act: str = "gelu"
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError("num_key_value_heads: must be num_attention_heads")
        if self.intermediate_size != _MERGED * self.hidden_size:
            raise ValueError(f"intermediate_size: must be {_MERGED} times hidden_size")
        if self.rope_parameters.get("rope_type", "default") != "default":
            raise ValueError("rope_parameters: not supported yet: scaled positions")

    def turns(self, count: int) -> Tensor:
        """[count, rotated dimensions], cosines and sines of the positions from 0."""
        head = self.hidden_size // self.num_attention_heads
        rotated = int(head * float(self.rope_parameters.get("partial_rotary_factor", 0.5)))
        theta = float(self.rope_parameters.get("rope_theta", 10000.0))
        waves = 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
        angles = torch.arange(count, dtype=torch.float32)[:, None] * waves
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


@frozen(kw_only=True)
class _Keys:
    projector_hidden_act: str = "gelu"


@frozen(eq=False, kw_only=True)
class GlmAsrConfig(MultimodalConfig):
    """config.json of GLM-ASR."""

    audio_type: ClassVar[type | None] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class _Tower(Tower):
    """Encodes windows of one length; the silence that fills them is attended to."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, width = c, b.shared.dtype, c.hidden_size
        self.conv1 = Convolution(b, "conv1", c.num_mel_bins, width, (3,), padding=1)
        self.conv2 = Convolution(b, "conv2", width, width, (3,), stride=2, padding=1)
        shape = BlockShape(
            hidden=width, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=_EPS, names=_NAMES,
        )  # fmt: skip
        count = c.num_hidden_layers
        self.layers = ModuleList(Block(b.at(f"layers.{i}"), shape) for i in range(count))
        self.norm = b.layer_norm("norm", width, _EPS)

    def run(self, mel: Tensor) -> Pieces[Tensor]:
        """[n, bins, frames] -> [n, frames / 2, hidden]."""
        x = F.gelu(self.conv1(mel.to(self.dtype)))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        n, count, _ = shape = x.shape
        turns = self.config.turns(count).to(x.device).repeat(n, 1)
        x = x.flatten(0, 1).contiguous()
        x = yield from through(self.layers, x, [count] * n, turns)
        out: Tensor = self.norm(x).view(shape)
        return out


class GlmAsrForConditionalGeneration(MultimodalModel):
    """GLM-ASR: sounds in windows of 30 seconds, before Llama."""

    api = 1
    config_type: ClassVar[type] = GlmAsrConfig
    media = ("audio",)
    names = WeightNames(rewrite=(zero_key_biases(),))

    def make_encoders(self, config: GlmAsrConfig, b: Builder) -> None:
        self.tower = _Tower(config.audio, b.at("audio_tower"))
        self.projector = PlainMLP(
            b.at("multi_modal_projector"), config.audio.intermediate_size, 2 * config.hidden_size,
            config.top_level.projector_hidden_act, up="linear_1", down="linear_2",
            outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        mel, windows = stacked(self, items, "input_features")
        states = yield from self.tower.run(mel)
        count = states.shape[1] // _MERGED
        merged = states[:, : count * _MERGED].reshape(len(mel), count, -1)
        tokens: Tensor = self.projector(merged.flatten(0, 1)).view(len(mel), count, -1)
        embeddings = []
        for item, rows in zip(items, tokens.split(windows), strict=True):
            frames = item.tensors["input_features_mask"].reshape(len(rows), -1).sum(-1).tolist()
            pairs = zip(rows, frames, strict=True)
            embeddings.append(torch.cat([row[: ((n - 1) // 2 + 1) // _MERGED] for row, n in pairs]))
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["GlmAsrForConditionalGeneration"],
            "model_type": "glmasr",
            "audio_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text(),
            "audio_config": {
                "model_type": "glmasr_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
            },
        }
