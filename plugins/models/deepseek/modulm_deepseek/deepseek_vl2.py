"""DeepSeek-VL2 (arXiv 2412.10302): SigLIP on tiles, squares of patches as tokens of DeepSeek V2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_deepseek.deepseek_v2 import tiny_deepseek
from modulm_layers import AttentionNames, PlainMLP, only, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    flat_patches,
    patches,
    stacked,
    through,
)

__all__ = ["DeepseekVL2Config", "DeepseekVL2ForCausalLM"]

_EPS = 1e-6
#: timm's names.
_NAMES = BlockNames(
    norm1="norm1",
    attn="attn",
    projections=AttentionNames("q", "k", "v", "proj", "qkv"),
    norm2="norm2",
)


@frozen(kw_only=True)
class _SightConfig:
    """`vision_config`, in timm's terms; the defaults are those of SigLIP so400m."""

    width: int = size(1152)
    layers: int = size(27)
    heads: int = size(16)
    mlp_ratio: float = 3.7362
    image_size: int = size(384)
    patch_size: int = size(14)
    class_token: bool = False

    def __attrs_post_init__(self) -> None:
        only(self, class_token=(False,))
        if self.width % self.heads:
            raise ValueError("heads: does not divide width")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")

    @property
    def side(self) -> int:
        """Patches along a side; what is left over at the edges is cut off."""
        return self.image_size // self.patch_size


@frozen(kw_only=True)
class _ProjectorConfig:
    """`projector_config`: squares of patches, then two linear layers."""

    projector_type: str = "downsample_mlp_gelu"
    depth: int = size(2)
    mlp_ratio: int = size(1)
    downsample_ratio: int = size(2)
    token_pooling: bool = False

    def __attrs_post_init__(self) -> None:
        only(
            self,
            projector_type=("downsample_mlp_gelu",),
            depth=(2,),
            token_pooling=(False,),
        )


@frozen(kw_only=True)
class _Keys:
    """Top-level keys. candidate_resolutions: (width, height) of grids of tiles."""

    tile_tag: str = "2D"
    global_view_pos: str = "head"
    candidate_resolutions: list[list[int]] = field(factory=lambda: [[384, 384]])

    def __attrs_post_init__(self) -> None:
        only(self, tile_tag=("2D",), global_view_pos=("head", "tail"))


@frozen(eq=False, kw_only=True)
class DeepseekVL2Config(MultimodalConfig):
    """config.json of DeepSeek-VL2."""

    vision_type: ClassVar[type] = _SightConfig
    top_level_type: ClassVar[type | None] = _Keys

    projector: _ProjectorConfig = field(factory=_ProjectorConfig)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text = table.get("language_config")
        vision, projector = (table.get(f"{part}_config") or {} for part in ("vision", "projector"))
        if not all(isinstance(part, Mapping) for part in (text, vision, projector)):
            raise CheckpointError(
                f"{file}: language_config, vision_config, projector_config: must be tables"
            )
        inner = {**(text or {})}
        # Without latent attention, as in the smallest model, the layers are DeepSeekMoE's.
        plain = inner.get("use_mla") is False or inner.get("kv_lora_rank", 512) is None
        inner["model_type"] = "deepseek_ocr2_text" if plain else "deepseek_v2"
        return cls(
            text=TextConfig.from_table({**table, "text_config": inner}, file),
            vision=read_config(vision, _SightConfig, file),
            top_level=read_config(dict(table), _Keys, file),
            projector=read_config(projector, _ProjectorConfig, file),
        )


class _Tower(Tower):
    """SigLIP with timm's names, on tiles of one size."""

    positions: Tensor

    def __init__(self, c: _SightConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        pixels = 3 * c.patch_size**2
        self.patch = b.linear("patch_embed.proj", pixels, c.width, bias=True, split=False)
        b.parameter("pos_embed", self, "positions", (1, c.side**2, c.width))
        block = BlockShape(
            hidden=c.width, inner=int(c.width * c.mlp_ratio), heads=c.heads, act="gelu",
            eps=_EPS, names=_NAMES,
        )  # fmt: skip
        self.layers = ModuleList(Block(b.at(f"blocks.{i}"), block) for i in range(c.layers))
        self.norm = b.layer_norm("norm", c.width, _EPS)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[tiles, channels, side, side] -> [tiles, patches, width]."""
        cut = patches(pixels.to(self.dtype), self.config.patch_size)
        x = self.patch(cut.flatten(0, 1)).view(*cut.shape[:2], -1) + self.positions
        shape = x.shape
        x = yield from through(self.layers, x.flatten(0, 1), [shape[1]] * shape[0])
        out: Tensor = self.norm(x).view(shape)
        return out


class DeepseekVL2ForCausalLM(MultimodalModel):
    """DeepSeek-VL2, of images: a view of all, and tiles."""

    api = 1
    config_type: ClassVar[type] = DeepseekVL2Config
    names = WeightNames(
        ignore=(r"^vision\.(attn_pool|head|fc_norm)\.",),
        rewrite=(flat_patches(r"patch_embed\.proj\.weight$"),),
    )
    newline: Tensor
    separator: Tensor

    def make_encoders(self, config: DeepseekVL2Config, b: Builder) -> None:
        keys, hidden = config.projector, config.hidden_size
        self.tower = _Tower(config.vision, b.at("vision"))
        inputs = config.vision.width * keys.downsample_ratio**2
        self.projector = PlainMLP(
            b.at("projector.layers"), inputs, hidden * keys.mlp_ratio, "gelu", up="0", down="2",
            outputs=hidden,
        )  # fmt: skip
        b.parameter("image_newline", self, "newline", (hidden,))
        b.parameter("view_seperator", self, "separator", (hidden,))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        side, ratio = self.config.vision.side, self.config.projector.downsample_ratio
        grid = states.transpose(1, 2).unflatten(2, (side, side))
        more = -side % ratio
        grid = F.pad(grid, (0, more, 0, more))
        # Each channel's square of patches in turn.
        squares = F.unfold(grid, ratio, stride=ratio).transpose(1, 2)
        tokens = self.projector(squares.flatten(0, 1)).view(*squares.shape[:2], -1)
        return [
            self._arranged(tiles, item.tensors["tile_grid"].reshape(-1).tolist())
            for item, tiles in zip(items, tokens.split(counts), strict=True)
        ]

    def _arranged(self, tiles: Tensor, grid: Sequence[int]) -> Tensor:
        """tiles: [1 + columns * rows, tokens, hidden], of a view of all and of a grid (columns,
        rows) -> [length, hidden].
        """
        columns, rows = grid
        side = round(tiles.shape[1] ** 0.5)
        square = tiles.unflatten(1, (side, side))
        local = square[1:].unflatten(0, (rows, columns)).transpose(1, 2)
        local = local.reshape(rows * side, columns * side, -1)
        views = [self._lines(square[0]), self.separator[None], self._lines(local)]
        if self.config.top_level.global_view_pos == "tail":
            views.reverse()
        return torch.cat(views)

    def _lines(self, x: Tensor) -> Tensor:
        """[rows, columns, hidden] -> [rows * (columns + 1), hidden], a token ends each row."""
        ends = self.newline.to(x.dtype).expand(len(x), 1, -1)
        return torch.cat([x, ends], dim=1).flatten(0, 1)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=((r"^language\.", ""), *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = tiny_deepseek("deepseek_v2", "DeepseekV2ForCausalLM", topk_method="greedy")
        return {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "candidate_resolutions": [[28, 28], [28, 56], [56, 28]],
            "global_view_pos": "head",
            "tile_tag": "2D",
            "language_config": {**text, "tie_word_embeddings": False},
            "projector_config": {"n_embed": 64, "input_dim": 32},
            "vision_config": {
                "width": 32,
                "layers": 2,
                "heads": 2,
                "mlp_ratio": 1.5,
                "image_size": 28,
                "patch_size": 4,
            },
        }
