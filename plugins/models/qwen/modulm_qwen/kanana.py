"""Kanana V (Kakao): Qwen2-VL's encoder, a convolutional abstractor (arXiv 2312.06742) and Llama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import size
from modulm_qwen.vision import QwenTower, QwenTowerConfig
from modulm_towers import (
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    flat_patches,
    tiny_text,
)

__all__ = ["KananaConfig", "KananaVForConditionalGeneration"]

#: The norms' epsilon.
_EPS = 1e-5
#: Channels of a stage for each of its gates.
_SQUEEZED = 4


@frozen(kw_only=True)
class _ProjectorConfig:
    """`projector_config`. pos_emb_size: cells of the square of learned positions. depth: blocks of
    a stage. mlp_depth: linear maps at the end.
    """

    encoder_hidden_size: int = size()
    hidden_size: int = size()
    output_hidden_size: int = size()
    depth: int = size(3)
    mlp_depth: int = size(2)
    merge_size: int = size(2)
    pos_emb: bool = True
    pos_emb_size: int = size(576)
    feature_layer_index: int = -1

    def __attrs_post_init__(self) -> None:
        if self.side**2 != self.pos_emb_size:
            raise ValueError(f"pos_emb_size: {self.pos_emb_size} cells are not a square")

    @property
    def side(self) -> int:
        """Cells along the side of the square."""
        return round(self.pos_emb_size**0.5)


@frozen(eq=False, kw_only=True)
class KananaConfig(MultimodalConfig):
    """config.json of Kanana V. projector: the abstractor's."""

    vision_type: ClassVar[type] = QwenTowerConfig

    projector: _ProjectorConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        names = ("text_config", "vision_config", "projector_config")
        for key in names:
            if not isinstance(table.get(key), Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        text, vision, projector = (table[key] for key in names)
        if (layer := projector.get("feature_layer_index", -1)) != -1:
            raise UnsupportedError(
                f"{file}: projector_config.feature_layer_index: only the last layer's states"
                f" (-1) are supported, not {layer!r}"
            )
        inner = {**text, "model_type": text.get("model_type", "llama")}
        config = cls(
            text=TextConfig.from_table({**table, "text_config": inner}, file),
            vision=read_config(vision, QwenTowerConfig, file),
            projector=read_config(projector, _ProjectorConfig, file),
        )
        if config.projector.encoder_hidden_size != config.vision.width:
            raise CheckpointError(
                f"{file}: projector_config.encoder_hidden_size:"
                f" {config.projector.encoder_hidden_size} is not the encoder's width"
                f" {config.vision.width}"
            )
        return config


class _Norm(Module):
    """A layer norm of the channels of [1, channels, rows, columns]."""

    def __init__(self, b: Builder, name: str, width: int) -> None:
        super().__init__()
        self.norm = b.layer_norm(name, width, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        """-> the same shape."""
        _, channels, rows, columns = x.shape
        normed: Tensor = self.norm(x[0].flatten(1).T.contiguous())
        return normed.T.view(1, channels, rows, columns)


class _Block(Module):
    """A residual block of RegNet Y (arXiv 2003.13678), with depthwise convolutions."""

    def __init__(self, b: Builder, inputs: int, outputs: int) -> None:
        super().__init__()
        inner = round(inputs / _SQUEEZED)
        convolve, at = (lambda *args, **kinds: Convolution(b, *args, bias=False, **kinds)), (1, 1)
        self.first = convolve("conv1.conv", inputs, outputs, at)
        self.first_norm = _Norm(b, "conv1.bn", outputs)
        self.near = convolve("conv2.conv", outputs, outputs, (3, 3), padding=1, groups=outputs)
        self.near_norm = _Norm(b, "conv2.bn", outputs)
        self.squeeze = Convolution(b, "se.fc1", outputs, inner, at)
        self.excite = Convolution(b, "se.fc2", inner, outputs, at)
        self.last = convolve("conv3.conv", outputs, outputs, at)
        self.last_norm = _Norm(b, "conv3.bn", outputs)
        self.widen: Module | None = None
        if inputs != outputs:
            self.widen = convolve("downsample.conv", inputs, outputs, at)
            self.widen_norm = _Norm(b, "downsample.bn", outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[1, inputs, rows, columns] -> the same with `outputs` channels."""
        past = x if self.widen is None else self.widen_norm(self.widen(x))
        x = F.silu(self.first_norm(self.first(x)))
        x = F.silu(self.near_norm(self.near(x)))
        gates = self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return F.silu(self.last_norm(self.last(x * gates.sigmoid())) + past)


class _Stage(Module):
    """Blocks of one width."""

    def __init__(self, b: Builder, depth: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.blocks = ModuleList(
            _Block(b.at(f"b{i + 1}"), inputs if i == 0 else outputs, outputs) for i in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[1, inputs, rows, columns] -> the same with `outputs` channels."""
        for block in self.blocks:
            x = block(x)
        return x


class _Abstractor(Module):
    """Learned positions, two stages around a merge of squares, and linear maps."""

    def __init__(self, c: _ProjectorConfig, b: Builder) -> None:
        super().__init__()
        self.config = c
        if c.pos_emb:
            shape = (1, c.pos_emb_size, c.encoder_hidden_size)
            b.parameter("pos_emb", self, "positions", shape)
        merged = c.merge_size**2 * c.hidden_size
        self.before = _Stage(b.at("net.0"), c.depth, c.encoder_hidden_size, c.hidden_size)
        self.after = _Stage(b.at("net.2"), c.depth, merged, c.hidden_size)
        widths = [c.hidden_size, *[c.output_hidden_size] * c.mlp_depth]
        self.readout = ModuleList(
            b.linear(f"readout.{2 * i}", widths[i], widths[i + 1], bias=True, split=False)
            for i in range(c.mlp_depth)
        )

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """x: [rows * columns, width] of an image -> [tokens, hidden]."""
        c = self.config
        x = x.view(1, rows, columns, -1).permute(0, 3, 1, 2)
        if c.pos_emb:
            square = self.positions.float().view(1, c.side, c.side, -1).permute(0, 3, 1, 2)
            if (rows, columns) != (c.side, c.side):
                square = F.interpolate(square, (rows, columns), mode="bicubic", antialias=True)
            x = x + square.to(x.dtype)
        x = F.pixel_unshuffle(self.before(x), c.merge_size)
        x = self.after(x).flatten(2)[0].T.contiguous()
        for i, part in enumerate(self.readout):
            x = part(F.silu(x) if i else x)
        return x


class KananaVForConditionalGeneration(MultimodalModel):
    """Kanana 1.5 V, of images."""

    api = 1
    config_type: ClassVar[type] = KananaConfig
    names = WeightNames(
        rename=((r"^vision_model\.", "visual."),),
        rewrite=(flat_patches(r"patch_embed\.proj\.weight$"),),
    )

    def make_encoders(self, config: KananaConfig, b: Builder) -> None:
        self.tower = QwenTower(config.vision, b.at("visual"), "2", merges=False)
        self.abstractor = _Abstractor(config.projector, b.at("abstractor"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        grids = [item.tensors["image_grid_thw"].reshape(-1).tolist() for item in items]
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        states = yield from self.tower.run(pixels, grids)
        parts = states.split([rows * columns for _, rows, columns in grids])
        # Patches are in the order of squares; the abstractor was trained on them row by row.
        return [
            self.abstractor(part, rows, columns)
            for part, (_, rows, columns) in zip(parts, grids, strict=True)
        ]

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, ignore=(*names.ignore, r"\.rotary_emb\.inv_freq$"))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["KananaVForConditionalGeneration"],
            "model_type": "kanana-1.5-v",
            "text_config": {
                **tiny_text("llama"),
                "eos_token_id": 479,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "model_type": "qwen2_vl",
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "mlp_ratio": 2,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "projector_config": {
                "encoder_hidden_size": 32,
                "hidden_size": 16,
                "output_hidden_size": 64,
                "depth": 1,
                "mlp_depth": 2,
                "merge_size": 2,
                "pos_emb": True,
                "pos_emb_size": 16,
                "feature_layer_index": -1,
            },
        }
