"""Cosmos 3 Edge: SigLIP 2 of any size with merged squares, positions on three axes as in Qwen3-VL.

Its text model is Arcee's: Llama's block with a plain feed-forward part. Only images; the weights of
the generator of videos and actions are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, size
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    NaflexTower,
    Pieces,
    Siglip2VisionConfig,
    tiny_text,
    windows,
)

__all__ = ["Cosmos3EdgeConfig", "Cosmos3EdgeForConditionalGeneration"]


@frozen(kw_only=True)
class _SightConfig(Siglip2VisionConfig):
    """`vision_config`."""

    spatial_merge_size: int = size(2)


@frozen(kw_only=True)
class _Keys:
    projector_hidden_size: int = size(11520)


@frozen(eq=False, kw_only=True)
class Cosmos3EdgeConfig(MultimodalConfig):
    """config.json of Cosmos 3 Edge."""

    vision_type: ClassVar[type] = _SightConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text = dict(table.get("text_config") or {})
        rope = {"rope_type": "default", "rope_theta": 1e8, "mrope_section": [24, 20, 20]}
        text["rope_parameters"] = {
            **(text.get("rope_parameters") or rope), "mrope_interleaved": True,
        }  # fmt: skip
        return super().from_table({**table, "text_config": text}, file)


class _Tower(NaflexTower):
    """Patches in the order of squares."""

    def _stretched(self, rows: int, columns: int) -> Tensor:
        order, _ = windows((1, rows, columns), 1, self.config.spatial_merge_size)
        return super()._stretched(rows, columns)[order.to(self.positions.device)]


class Cosmos3EdgeForConditionalGeneration(MultimodalModel):
    """Cosmos 3 Edge."""

    api = 1
    config_type: ClassVar[type] = Cosmos3EdgeConfig
    axes = 3
    names = WeightNames(
        rename=(
            # transformers' files have the names of the text model's parts in the encoder too.
            (r"^((?:model\.)?visual\..*\.mlp)\.up_proj\.", r"\1.fc1."),
            (r"^((?:model\.)?visual\..*\.mlp)\.down_proj\.", r"\1.fc2."),
            (r"^(embed_tokens|norm|layers)\.", r"model.\1."),
            (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
            (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
            (r"^(model\.(?:language_model\.)?layers\.\d+\.mlp)\.fc1\.", r"\1.up_proj."),
            (r"^(model\.(?:language_model\.)?layers\.\d+\.mlp)\.fc2\.", r"\1.down_proj."),
        ),
        ignore=(
            r"^(model\.)?(language_model\.)?(action_modality_embed|action_proj_|time_embedder\.)",
            r"^(model\.)?(language_model\.)?proj_(in|out)\.",
            r"_moe_gen\.",
            r"\.self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen)\.",
        ),
    )

    def make_encoders(self, config: Cosmos3EdgeConfig, b: Builder) -> None:
        vision, at = config.vision, b.at("projector")
        self.tower = _Tower(vision, b.at("visual"))
        self.norm = at.layer_norm("norm", vision.hidden_size, 1e-6)
        self.projector = PlainMLP(
            at, vision.hidden_size * vision.spatial_merge_size**2,
            config.top_level.projector_hidden_size, "gelu",
            up="linear_fc1", down="linear_fc2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        grids = [item.tensors["image_grid_thw"].reshape(-1, 3).tolist() for item in items]
        flat = [(rows, columns) for some in grids for _, rows, columns in some]
        seen = yield from self.tower.run(pixels, flat)
        merged = self.config.vision.spatial_merge_size**2
        tokens: Tensor = self.projector(self.norm(seen).unflatten(0, (-1, merged)).flatten(1))
        return tokens.split([sum(h * w for _, h, w in some) // merged for some in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        return {
            "architectures": ["Cosmos3EdgeForConditionalGeneration"],
            "model_type": "cosmos3_edge",
            "image_token_id": 480,
            "video_token_id": 481,
            "vision_start_token_id": 482,
            "vision_end_token_id": 483,
            "projector_hidden_size": 48,
            "tie_word_embeddings": False,
            "text_config": tiny_text("cosmos3_edge_text", head_dim=16, rope_parameters=rope),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_patches": 16,
                "patch_size": 4,
            },
        }
