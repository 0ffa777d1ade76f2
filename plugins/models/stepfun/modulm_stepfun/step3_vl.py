"""Step 3 with images (arXiv 2507.19427): blocks normalized behind each branch, on windows and the
image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size
from modulm_stepfun.step3 import Step3TextForCausalLM
from modulm_stepfun.step_vl import joined
from modulm_towers import (
    BlockShape,
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    VisionAttention,
    flat_patches,
    patches,
    through,
)

__all__ = ["Step3VLConfig", "Step3VLForConditionalGeneration"]

#: Copies of the class token in front of the patches.
_LEADING = 4


@frozen(kw_only=True)
class _SightConfig:
    """`vision_config`. output_hidden_size: channels after the first convolution."""

    hidden_size: int = size(1792)
    intermediate_size: int = size(3072)
    output_hidden_size: int = size(4096)
    num_hidden_layers: int = size(63)
    num_attention_heads: int = size(16)
    image_size: int = size(728)
    patch_size: int = size(14)
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return self.image_size // self.patch_size


@frozen(eq=False, kw_only=True)
class Step3VLConfig(MultimodalConfig):
    """config.json of Step 3. stride: of the first convolution."""

    vision_type: ClassVar[type | None] = _SightConfig

    stride: int = 2
    projector_bias: bool = False

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = table.get("text_config"), table.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: text_config, vision_config: must be tables")
        return cls(
            text=TextConfig.from_table(table, file),
            vision=read_config(vision, _SightConfig, file),
            stride=int(table.get("understand_projector_stride", 2)),
            projector_bias=bool(table.get("projector_bias", False)),
        )


class _Block(Module):
    """Attention and a feed-forward block, each followed by its norm."""

    def __init__(self, c: _SightConfig, b: Builder) -> None:
        super().__init__()
        shape = BlockShape(
            hidden=c.hidden_size, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act,
        )  # fmt: skip
        self.attn = VisionAttention(b.at("self_attn"), shape)
        self.norm1 = b.layer_norm("layer_norm1", c.hidden_size, c.layer_norm_eps)
        self.mlp = PlainMLP(
            b.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_act, up="fc1", down="fc2"
        )
        self.norm2 = b.layer_norm("layer_norm2", c.hidden_size, c.layer_norm_eps)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [patches, hidden] -> [patches, hidden]."""
        x = x + self.norm1(self.attn(x, lengths, None))
        out: Tensor = x + self.norm2(self.mlp(x))
        return out


class _Tower(Tower):
    """Square images of one size."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: _SightConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, at = c, b.shared.dtype, b.at("embeddings")
        self.patch = at.linear(
            "patch_embedding", 3 * c.patch_size**2, c.hidden_size, bias=True, split=False
        )
        at.parameter("class_embedding", self, "first", (1, c.hidden_size))
        shape = (c.side**2 + 1, c.hidden_size)
        at.parameter("position_embedding.weight", self, "positions", shape)
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(_Block(c, b.at(f"transformer.layers.{i}")) for i in layers)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, 3, side, side] -> [n, hidden, rows, columns]."""
        n, count = len(pixels), pixels.shape[2] // self.config.patch_size
        cut = patches(pixels.to(self.dtype), self.config.patch_size)
        x = self.patch(cut.flatten(0, 1)).view(n, count**2, -1) + self._positions(count)
        first = (self.first + self.positions[:1]).expand(n, _LEADING, -1)
        x = torch.cat([first, x], dim=1)
        length = x.shape[1]
        x = yield from through(self.layers, x.flatten(0, 1), [length] * n)
        x = x.view(n, length, -1)[:, _LEADING:]
        return x.transpose(1, 2).unflatten(2, (count, count))

    def _positions(self, count: int) -> Tensor:
        """[patches, hidden]: learned positions, interpolated to a square of that side."""
        side = self.config.side
        if count == side:
            return self.positions[1:]
        square = self.positions[1:].float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(
            square, (count, count), mode="bicubic", antialias=True, align_corners=False
        )
        return resized[0].flatten(1).T.to(self.dtype)


class Step3VLForConditionalGeneration(MultimodalModel):
    """Step 3."""

    api = 1
    config_type: ClassVar[type] = Step3VLConfig

    def make_encoders(self, config: Step3VLConfig, b: Builder) -> None:
        vision = config.vision
        self.tower = _Tower(vision, b.at("vision_model"))
        inner = vision.output_hidden_size
        self.down = Convolution(
            b, "vit_downsampler", vision.hidden_size, inner, (2, 2), stride=config.stride
        )
        self.down2 = Convolution(
            b, "vit_downsampler2", inner, 2 * inner, (3, 3), stride=2, padding=1
        )
        self.projector = b.linear(
            "vit_large_projector", 2 * inner, config.hidden_size,
            bias=config.projector_bias, split=False,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        return (yield from joined(self, items, self._tokens))

    def _tokens(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, 3, side, side] -> [n, tokens, hidden of the text model]."""
        x = yield from self.tower.run(pixels)
        x = self.down2(self.down(x)).flatten(2).transpose(1, 2)
        tokens: Tensor = self.projector(x.flatten(0, 1))
        return tokens.view(len(x), x.shape[1], -1)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        rename = (r"^model\.(vision_model|vit_\w+)\.", r"\1.")
        return evolve(
            names,
            rename=(rename, *names.rename),
            rewrite=(
                flat_patches(r"^vision_model\.embeddings\.patch_embedding\.weight$"),
                *names.rewrite,
            ),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = dict(Step3TextForCausalLM.tiny())
        del text["architectures"]
        return {
            "architectures": ["Step3VLForConditionalGeneration"],
            "model_type": "step3_vl",
            "image_token_id": 480,
            "understand_projector_stride": 2,
            "projector_bias": False,
            "hidden_size": text["hidden_size"],
            "text_config": {**text, "model_type": "step3_text"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "output_hidden_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 4,
            },
        }
