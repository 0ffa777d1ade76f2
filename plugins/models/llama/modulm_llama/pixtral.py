"""Pixtral (arXiv 2410.07073), and later models that see, in Mistral's own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.errors import CheckpointError
from modulm.nn import Builder, read_config
from modulm_layers import PlainMLP, size
from modulm_llama.mistral3 import Mistral3Config, Mistral3ForConditionalGeneration
from modulm_towers import PixtralTower, TextConfig, TowerConfig, patches, tiny_text

__all__ = ["PixtralConfig", "PixtralForConditionalGeneration"]

_EPS = 1e-5
_MERGES = "patch_merge"


@frozen(kw_only=True)
class _Keys:
    """`vision_encoder` of params.json, of what joins the encoder and the text model."""

    adapter_bias: bool = True
    add_pre_mm_projector_layer_norm: bool = False
    mm_projector_id: str = ""
    spatial_merge_size: int = size(1)

    def __attrs_post_init__(self) -> None:
        if self.mm_projector_id not in ("", _MERGES):
            raise ValueError(f"mm_projector_id: {self.mm_projector_id!r}: must be {_MERGES!r}")
        if self.spatial_merge_size > 1 and self.mm_projector_id != _MERGES:
            raise ValueError(f"spatial_merge_size: needs mm_projector_id {_MERGES!r}")


@frozen(eq=False, kw_only=True)
class PixtralConfig(Mistral3Config):
    """params.json, as `modulm-loader-mistral` translates it: `text_config` beside `vision_config`,
    which is `vision_encoder`.
    """

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read the configuration. Raises CheckpointError, UnsupportedError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping) or not isinstance(table.get("text_config"), Mapping):
            raise CheckpointError(f"{file}: text_config, vision_config: must be tables")
        sees = {**vision, "model_type": "pixtral", "hidden_act": "silu"}
        return cls(
            text=TextConfig.from_table(table, file),
            vision=read_config(sees, TowerConfig, file),
            top_level=read_config(vision, _Keys, file),
        )


class _Adapter(Module):
    """A norm and a merge of squares, where there are any, and two linear layers."""

    def __init__(self, config: PixtralConfig, b: Builder) -> None:
        super().__init__()
        keys, width = config.top_level, config.vision.hidden_size
        self.side = keys.spatial_merge_size
        self.merges = keys.mm_projector_id == _MERGES
        self.norm = None
        if keys.add_pre_mm_projector_layer_norm:
            self.norm = b.rms_norm("norm", width, _EPS)
        if self.merges:
            inputs = width * self.side**2
            self.merging = b.linear("patch_merger.merging_layer", inputs, width, split=False)
        self.mlp = PlainMLP(
            b, width, config.hidden_size, "gelu", bias=keys.adapter_bias, up="linear_1",
            down="linear_2", outputs=config.hidden_size,
        )  # fmt: skip

    def forward(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """x: [patches of all, width]; grids: (rows, columns) of each -> [tokens, hidden]."""
        x = x if self.norm is None else self.norm(x)
        if self.merges:
            parts = x.split([rows * columns for rows, columns in grids])
            squares = [
                patches(part.T.reshape(1, -1, *grid), self.side)[0]
                for part, grid in zip(parts, grids, strict=True)
            ]
            x = self.merging(torch.cat(squares))
        out: Tensor = self.mlp(x)
        return out


class PixtralForConditionalGeneration(Mistral3ForConditionalGeneration):
    """Pixtral 12B and Large, Mistral Small 3.1 and Ministral 3, as Mistral publishes them."""

    config_type: ClassVar[type] = PixtralConfig

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = PixtralTower(config.vision, b.at("vision_tower"))
        self.adapter = _Adapter(config, b.at("multi_modal_projector"))

    def projector(self, states: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """The adapter; see there."""
        tokens: Tensor = self.adapter(states, grids)
        return tokens

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["PixtralForConditionalGeneration"],
            "model_type": "pixtral",
            "text_config": tiny_text("mistral"),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_channels": 3,
                "image_size": 56,
                "max_image_size": 56,
                "patch_size": 4,
                "rope_theta": 10000.0,
                "image_token_id": 10,
                "image_break_token_id": 12,
                "image_end_token_id": 13,
                "adapter_bias": False,
                "mm_projector_id": "patch_merge",
                "spatial_merge_size": 2,
                "add_pre_mm_projector_layer_norm": True,
            },
        }
