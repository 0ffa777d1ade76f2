"""MiniCPM-V 2.5, 2.6, 4.0 and 4.5 (arXiv 2408.01800): SigLIP on slices of an image, with queries
that read the patches of each slice. MiniCPM-o is around it (`hearing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import size, tiny_config
from modulm_minicpm.vl import bucket_positions
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    TowerConfig,
    flat_patches,
    through,
)

__all__ = ["MiniCPMV2Config", "MiniCPMV2ForConditionalGeneration", "MiniCPMV2Keys"]

#: Versions, and the text models of each.
_TEXTS: Mapping[str, str] = {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}
#: Channels of a head of the queries.
_HEAD = 128
_EPS = 1e-6


@frozen(kw_only=True)
class MiniCPMV2Keys:
    """query_num: tokens of a slice."""

    query_num: int = size(64)
    drop_vision_last_layer: bool = False
    head: int = _HEAD


@frozen(eq=False, kw_only=True)
class MiniCPMV2Config(MultimodalConfig):
    """config.json of MiniCPM-V: the text model's keys beside `vision_config`."""

    top_level_type: ClassVar[type | None] = MiniCPMV2Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        version = str(table.get("version", "2.0"))
        text_type = _TEXTS.get(version)
        if text_type is None:
            known = ", ".join(_TEXTS)
            raise UnsupportedError(f"version: not supported yet: {version!r}, only {known}")
        keys: Any = read_config(table, cls.top_level_type or MiniCPMV2Keys, file)
        encoder = {**vision, "model_type": "siglip_vision_model", "layer_norm_eps": _EPS}
        encoder.setdefault("hidden_act", "gelu_pytorch_tanh")
        if keys.drop_vision_last_layer:
            encoder["num_hidden_layers"] -= 1
        text = {key: value for key, value in table.items() if key != "vision_config"}
        text["model_type"] = text_type
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            vision=read_config(encoder, TowerConfig, file),
            top_level=keys,
        )


class _Tower(ClipTower):
    """Images of any size, with positions bucketed by the patch's fraction of a side."""

    def patched(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [patches, hidden]."""
        side = self.config.image_size // self.config.patch_size
        positions = torch.cat([bucket_positions(grid, side) for grid in grids]).to(pixels.device)
        x = self.patch(pixels.to(self.dtype)) + self.positions[positions]
        x = yield from through(self.layers, x, [rows * columns for rows, columns in grids])
        out: Tensor = self.post(x)
        return out


class _Queries(Module):
    """Learned queries attend to the patches of a slice once."""

    query: Tensor
    inputs: Tensor
    input_biases: Tensor
    turn: Tensor

    def __init__(self, b: Builder, patch: int, width: int, keys: MiniCPMV2Keys) -> None:
        super().__init__()
        self.heads = width // keys.head
        b.parameter("query", self, "query", (keys.query_num, width))
        self.narrow = b.linear("kv_proj", patch, width, bias=False, split=False)
        b.parameter("attn.in_proj_weight", self, "inputs", (3 * width, width))
        b.parameter("attn.in_proj_bias", self, "input_biases", (3 * width,))
        self.out = b.linear("attn.out_proj", width, width, bias=True, split=False)
        self.query_norm = b.layer_norm("ln_q", width, _EPS)
        self.patch_norm = b.layer_norm("ln_kv", width, _EPS)
        self.last_norm = b.layer_norm("ln_post", width, _EPS)
        b.parameter("proj", self, "turn", (width, width))

    def forward(self, x: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
        """x: [patches, patch width] of all slices -> [slices * queries, width]."""
        values = self.patch_norm(self.narrow(x))
        places = torch.cat([sine_positions(grid, values.shape[1]) for grid in grids])
        keys = values + places.to(values)
        weights, biases = self.inputs.chunk(3), self.input_biases.chunk(3)
        q, k, v = (
            F.linear(part, weight, bias).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for part, weight, bias in zip(
                (self.query_norm(self.query), keys, values), weights, biases, strict=True
            )
        )
        counts = [rows * columns for rows, columns in grids]
        seen = [
            F.scaled_dot_product_attention(q, slice_keys, slice_values).transpose(0, 1).flatten(1)
            for slice_keys, slice_values in zip(k.split(counts, 1), v.split(counts, 1), strict=True)
        ]
        out: Tensor = self.last_norm(self.out(torch.cat(seen))) @ self.turn
        return out


def sine_positions(grid: Sequence[int], width: int) -> Tensor:
    """[patches, width]: sines and cosines of columns, then of rows."""
    rows, columns = grid
    quarter = width // 4
    waves = 10000.0 ** -(torch.arange(quarter) / quarter)

    def along(positions: Tensor) -> Tensor:
        angles = positions[:, None] * waves
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    column = along(torch.arange(columns).repeat(rows))
    return torch.cat([column, along(torch.arange(rows).repeat_interleave(columns))], dim=-1)


class MiniCPMV2ForConditionalGeneration(MultimodalModel):
    """MiniCPM-V 2.5 to 4.5, of images."""

    api = 1
    config_type: ClassVar[type] = MiniCPMV2Config
    names = WeightNames(
        rename=((r"^llm\.", ""),),
        ignore=(
            r"^(apm|audio_projection_layer|audio_avg_pooler|tts)\.",
            r"^resampler\.(pos_embed|temporal_pos_embed)$",
        ),
        rewrite=(flat_patches(r"^vpm\.embeddings\.patch_embedding\.weight$"),),
    )

    def make_encoders(self, config: MiniCPMV2Config, b: Builder) -> None:
        self.tower = _Tower(config.vision, b.at("vpm"))
        width = config.vision.hidden_size
        self.queries = _Queries(b.at("resampler"), width, config.hidden_size, config.top_level)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        side = self.config.vision.patch_size
        cut = [
            self.tensor(item, "pixel_values")[0].unflatten(2, (-1, side)).permute(2, 0, 1, 3)
            for item in items
        ]
        each = [item.tensors["target_sizes"].reshape(-1, 2).tolist() for item in items]
        grids = [grid for item_grids in each for grid in item_grids]
        x = yield from self.tower.patched(torch.cat([part.flatten(1) for part in cut]), grids)
        tokens = self.queries(x, grids)
        count = self.config.top_level.query_num
        per_item: Sequence[Tensor] = tokens.split([count * len(grids) for grids in each])
        return per_item

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        last = config.vision.num_hidden_layers
        if not config.top_level.drop_vision_last_layer:
            return names
        return evolve(names, ignore=(*names.ignore, rf"^vpm\.encoder\.layers\.{last}\."))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("qwen2", "MiniCPMV"),
            "model_type": "minicpmv",
            "version": 2.6,
            "query_num": 4,
            "head": 32,
            "tie_word_embeddings": False,
            "slice_config": {"max_slice_nums": 4, "scale_resolution": 32, "patch_size": 4},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 4,
            },
        }
