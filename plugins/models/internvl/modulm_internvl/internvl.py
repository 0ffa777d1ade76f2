"""InternVL 2.5 to 3.5 (arXiv 2412.05271, 2504.10479), in the format of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_layers import AttentionNames, PlainMLP, only, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    flat_patches,
    patches,
    pixel_shuffle,
    stacked,
    through,
    tiny_text,
)

__all__ = [
    "InternS1Config",
    "InternS1ForConditionalGeneration",
    "InternVLConfig",
    "InternVLForConditionalGeneration",
]

_NAMES = BlockNames(
    norm1="layernorm_before",
    attn="attention",
    projections=AttentionNames("q_proj", "k_proj", "v_proj", "projection_layer", "qkv_proj"),
    norm2="layernorm_after",
    mlp="mlp",
)


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`; images and patches are square."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: tuple[int, ...] = (448, 448)
    patch_size: tuple[int, ...] = (14, 14)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    norm_type: str = "layer_norm"
    attention_bias: bool = False
    use_qk_norm: bool = False
    use_mask_token: bool = False
    use_absolute_position_embeddings: bool = True
    use_mean_pooling: bool = True

    def __attrs_post_init__(self) -> None:
        only(
            self, norm_type=("layer_norm", "rms_norm"), use_mask_token=(False,),
            use_absolute_position_embeddings=(True,), use_mean_pooling=(True,),
        )  # fmt: skip
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        for key, sides in (("image_size", self.image_size), ("patch_size", self.patch_size)):
            if len(set(sides)) != 1 or sides[0] < 1:
                raise ValueError(f"{key}: {list(sides)}: squares are expected")
        if self.patch_size[0] > self.image_size[0]:
            raise ValueError("patch_size: larger than image_size")

    @property
    def side(self) -> int:
        """Patches along a side."""
        return self.image_size[0] // self.patch_size[0]


@frozen(kw_only=True)
class _Keys:
    projector_hidden_act: str = "gelu"
    downsample_ratio: float = 0.5


@frozen(eq=False, kw_only=True)
class InternVLConfig(MultimodalConfig):
    """config.json of InternVL. layer: the tower layer whose states are used."""

    vision_type: ClassVar[type] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    layer: int = -1

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        layer, strategy = keys["vision_feature_layer"], keys["vision_feature_select_strategy"]
        if layer != -1 or strategy != "default":
            raise CheckpointError(
                f"{file}: vision_feature_layer: not supported yet: {layer!r} with {strategy!r}"
            )
        return {"layer": layer}


class _Tower(Tower):
    """A class token, then the patches; each branch of a layer has a learned scale."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        at, pixels = b.at("embeddings"), c.num_channels * c.patch_size[0] ** 2
        name = "patch_embeddings.projection"
        self.patch = at.linear(name, pixels, c.hidden_size, bias=True, split=False)
        at.parameter("cls_token", self, "first", (1, 1, c.hidden_size))
        shape = (1, c.side**2 + 1, c.hidden_size)
        at.parameter("position_embeddings", self, "positions", shape)
        block = BlockShape(
            hidden=c.hidden_size, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps, rms=c.norm_type == "rms_norm",
            bias=c.attention_bias, names=_NAMES, scales=("lambda_1", "lambda_2"),
            qk_norm=c.use_qk_norm,
        )  # fmt: skip
        count = c.num_hidden_layers
        self.layers = ModuleList(Block(b.at(f"encoder.layer.{i}"), block) for i in range(count))

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, patches, hidden]."""
        n = len(pixels)
        cut = patches(pixels.to(self.dtype), self.config.patch_size[0])
        x = self.patch(cut.flatten(0, 1)).view(n, cut.shape[1], -1)
        x = torch.cat([self.first.expand(n, 1, -1), x], dim=1) + self.positions
        shape = x.shape
        x = yield from through(self.layers, x.flatten(0, 1), [shape[1]] * n)
        out: Tensor = x.view(shape)[:, 1:]
        return out


class InternVLForConditionalGeneration(MultimodalModel):
    """InternVL; the text model is Qwen 2.5 or 3, or Llama."""

    api = 1
    config_type: ClassVar[type] = InternVLConfig
    media = ("image", "video")
    names = WeightNames(rewrite=(flat_patches(r"patch_embeddings\.projection\.weight$"),))

    def make_encoders(self, config: InternVLConfig, b: Builder) -> None:
        self.tower = self.make_tower(config, b)
        self.scale = int(1 / config.top_level.downsample_ratio)
        inputs, at = config.vision.hidden_size * self.scale**2, b.at("multi_modal_projector")
        self.norm = at.layer_norm("layer_norm", inputs, 1e-5)
        self.projector = self.make_projector(config, inputs, at)

    def make_tower(self, config: InternVLConfig, b: Builder) -> Any:
        """The encoder, whose `run` makes pixels states of patches."""
        return _Tower(config.vision, b.at("vision_tower"))

    def make_projector(self, config: InternVLConfig, inputs: int, b: Builder) -> Module:
        """What makes squares of patches, [n, inputs], embeddings."""
        return PlainMLP(
            b, inputs, config.hidden_size, config.top_level.projector_hidden_act,
            up="linear_1", down="linear_2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        side = math.isqrt(states.shape[1])
        grid = states.reshape(len(pixels), side, side, -1)
        squares = pixel_shuffle(grid, self.scale)
        each = squares.shape[1] * squares.shape[2]
        tokens: Tensor = self.projector(self.norm(squares.flatten(0, 2)))
        return tokens.split([count * each for count in counts])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text("qwen2"),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [28, 28],
                "patch_size": [7, 7],
            },
        }


@frozen(eq=False, kw_only=True)
class InternS1Config(InternVLConfig):
    """config.json of Intern-S1, which has InternVL's keys under names of its own."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        vision = {**(table.get("vision_config") or {}), "model_type": "internvl_vision"}
        names = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl"}
        return super().from_table({**table, **names, "vision_config": vision}, file)


class InternS1ForConditionalGeneration(InternVLForConditionalGeneration):
    """Intern-S1 and its mini: InternVL before Qwen 3, dense or with experts."""

    config_type = InternS1Config
