"""Llama 4 with images (Meta, 2025): tiles with 2D rotary positions and merged patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder
from modulm_layers import AttentionNames, activation, size
from modulm_llama.llama4 import Llama4ForCausalLM
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    axial_turns,
    grid_coordinates,
    patches,
    pixel_shuffle,
    stacked,
    through,
)

__all__ = ["Llama4ForConditionalGeneration", "Llama4VisionConfig"]

_EPS = 1e-5
_NAMES = BlockNames(
    norm1="input_layernorm",
    projections=AttentionNames("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    norm2="post_attention_layernorm",
)


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`. pixel_shuffle_ratio: the inverse of the side of squares that become one
    token. intermediate_size: also the width of such a square.
    """

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: int = size(448)
    patch_size: int = size(14)
    vision_output_dim: int = size(7680)
    projector_input_dim: int = size(4096)
    projector_output_dim: int = size(4096)
    pixel_shuffle_ratio: float = 0.5
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} heads of {self.hidden_size} "
                "cannot be rotated"
            )
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")
        if not 0 < self.pixel_shuffle_ratio <= 1:
            raise ValueError(f"pixel_shuffle_ratio: {self.pixel_shuffle_ratio}")
        if self.intermediate_size != self.hidden_size * self.merge**2:
            raise ValueError(f"intermediate_size: not that of squares of {self.merge} patches")

    @property
    def merge(self) -> int:
        """The side of squares that become one token."""
        return round(1 / self.pixel_shuffle_ratio)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def side(self) -> int:
        """Patches along a side."""
        return self.image_size // self.patch_size


@frozen(eq=False, kw_only=True)
class Llama4VisionConfig(MultimodalConfig):
    """config.json of Llama 4 with images."""

    vision_type: ClassVar[type] = _TowerConfig


class _Tower(Tower):
    """Encodes the patches of a tile and a final class token, which is not rotated."""

    last: Tensor
    positions: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, hidden = c, b.shared.dtype, c.hidden_size
        pixels = c.num_channels * c.patch_size**2
        self.patch = b.linear("patch_embedding.linear", pixels, hidden, split=False)
        b.parameter("class_embedding", self, "last", (hidden,))
        b.parameter("positional_embedding_vlm", self, "positions", (c.side**2 + 1, hidden))
        self.pre = b.layer_norm("layernorm_pre", hidden, _EPS)
        shape = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads, act="gelu",
            eps=_EPS, neox=False, names=_NAMES,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"model.layers.{i}"), shape) for i in layers)
        self.post = b.layer_norm("layernorm_post", hidden, _EPS)
        at, outputs = b.at("vision_adapter.mlp"), c.projector_output_dim
        self.up = at.linear("fc1", c.intermediate_size, c.projector_input_dim, split=False)
        self.down = at.linear("fc2", outputs, outputs, split=False)
        self.act = activation("gelu", b.ops)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, tokens, outputs]."""
        c, n = self.config, len(pixels)
        cut = patches(pixels.to(self.dtype), c.patch_size)
        x = self.patch(cut.flatten(0, 1)).view(n, cut.shape[1], -1)
        x = torch.cat([x, self.last.expand(n, 1, -1)], dim=1) + self.positions
        shape = x.shape
        x = self.pre(x.flatten(0, 1))
        turns = self._turns().to(x.device).repeat(n, 1)
        x = yield from through(self.layers, x, [shape[1]] * n, turns)
        x = self.post(x).view(shape)[:, :-1]
        squares = pixel_shuffle(x.reshape(n, c.side, c.side, -1), c.merge).flatten(1, 2)
        tokens: Tensor = self.act(self.down(self.act(self.up(squares.flatten(0, 1)))))
        return tokens.view(n, squares.shape[1], -1)

    def _turns(self) -> Tensor:
        """[tokens of a tile, head_dim]; columns and rows count from 1."""
        theta = float(self.config.rope_parameters.get("rope_theta", 10000.0))
        coordinates = grid_coordinates((1, self.config.side, self.config.side), 1).flip(1) + 1
        all_coordinates = torch.cat([coordinates, coordinates.new_zeros(1, 2)])
        return axial_turns(all_coordinates, self.config.head_dim, theta)


class Llama4ForConditionalGeneration(MultimodalModel):
    """Llama 4 with images; the text model is its own."""

    api = 1
    config_type: ClassVar[type] = Llama4VisionConfig

    def make_encoders(self, config: Llama4VisionConfig, b: Builder) -> None:
        self.tower = _Tower(config.vision, b.at("vision_model"))
        inputs, name = config.vision.vision_output_dim, "multi_modal_projector.linear_1"
        self.projector = b.linear(name, inputs, config.hidden_size, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        tokens: Tensor = self.projector(states.flatten(0, 1))
        return tokens.split([count * states.shape[1] for count in counts])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = dict(Llama4ForCausalLM.tiny())
        return {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "image_token_index": 481,
            "text_config": {key: value for key, value in text.items() if key != "architectures"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "vision_output_dim": 48,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
            },
        }
