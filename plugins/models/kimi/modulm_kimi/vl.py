"""Kimi-VL (arXiv 2504.07491) and Kimi K2.5: MoonViT and DeepSeek-V3's text model.

Accepts files of Moonshot AI's own code and of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import PlainMLP, size
from modulm_towers import (
    MoonVit,
    MoonVitConfig,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    flat_patches,
    tiny_text,
)

__all__ = ["KimiK25ForConditionalGeneration", "KimiVLConfig", "KimiVLForConditionalGeneration"]

#: transformers' architecture for all of them.
_KNOWN = "Kimi_K25ForConditionalGeneration"
_BLOCKS = r"^vision_tower\.encoder\.blocks\.(\d+)"


@frozen(kw_only=True)
class _Keys:
    """projection_layer_norm_eps: of the norm before patches are joined."""

    projection_layer_norm_eps: float = 1e-5
    projection_hidden_size: int = size(1152)


@frozen(eq=False, kw_only=True)
class KimiVLConfig(MultimodalConfig):
    """config.json of Kimi-VL or Kimi K2.5."""

    vision_type: ClassVar[type | None] = MoonVitConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Parse the table. Raises CheckpointError, UnsupportedError."""
        return super().from_table(_transformers_table(table), file)


def _transformers_table(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert config.json to transformers' form."""
    renamed = {**table, "architectures": [_KNOWN]}
    vision = table.get("vision_config")
    if not isinstance(vision, Mapping):
        return renamed
    vision_settings = {
        key.removeprefix("vt_").removeprefix("init_"): value
        for key, value in vision.items()
        if key != "model_type"
    }
    width = vision_settings.get("mm_hidden_size", vision_settings.get("hidden_size"))
    further = {
        "vision_config": vision_settings,
        "projection_hidden_size": table.get("projection_hidden_size", width),
    }
    if "projector_ln_eps" in vision_settings:
        further["projection_layer_norm_eps"] = vision_settings["projector_ln_eps"]
    return {**renamed, **further}


class KimiVLForConditionalGeneration(MultimodalModel):
    """Kimi-VL: images."""

    api = 1
    config_type: ClassVar[type] = KimiVLConfig
    names = WeightNames(
        rename=(
            (r"^model\.mm_projector\.", "mm_projector."),
            (r"^multi_modal_projector\.", "mm_projector."),
            (r"^mm_projector\.(proj\.0|linear_1)\.", "mm_projector.in_proj."),
            (r"^mm_projector\.(proj\.2|linear_2)\.", "mm_projector.out_proj."),
            (rf"{_BLOCKS}\.norm1\.", r"vision_tower.layers.\1.norm2."),
            (rf"{_BLOCKS}\.norm0\.", r"vision_tower.layers.\1.norm1."),
            (rf"{_BLOCKS}\.mlp\.fc1\.", r"vision_tower.layers.\1.mlp.fc2."),
            (rf"{_BLOCKS}\.mlp\.fc0\.", r"vision_tower.layers.\1.mlp.fc1."),
            (rf"{_BLOCKS}\.wo\.", r"vision_tower.layers.\1.attn.proj."),
            (rf"{_BLOCKS}\.", r"vision_tower.layers.\1."),
            (r"^vision_tower\.encoder\.", "vision_tower."),
            (r"\.pos_emb\.position_embeddings$", ".pos_emb.weight"),
            # transformers 5.23 writes these names for the text model's layers.
            (r"^model\.blocks\.", "model.layers."),
        ),
        rewrite=(flat_patches(r"patch_embed\.proj\.weight$"),),
    )

    @classmethod
    def weights(cls, config: KimiVLConfig) -> WeightNames:
        names = super().weights(config)
        turned = partial(_turned, config.vision.num_attention_heads)
        return evolve(names, rewrite=(Rewrite(r"\.wqkv\.(weight|bias)$", turned), *names.rewrite))

    def make_encoders(self, config: KimiVLConfig, b: Builder) -> None:
        self.tower = MoonVit(config.vision, b.at("vision_tower"))
        at, wide = b.at("mm_projector"), config.vision.merged * config.vision.hidden_size
        eps = config.top_level.projection_layer_norm_eps
        self.norm = at.layer_norm("pre_norm", config.top_level.projection_hidden_size, eps)
        self.projector = PlainMLP(
            at, wide, wide, "gelu", up="in_proj", down="out_proj", outputs=config.hidden_size
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, each = [], []
        for item in items:
            name = "pixel_values_videos" if item.kind == "video" else "pixel_values"
            pixels.append(self.tensor(item, name).flatten(1))
            each.append(item.tensors[f"{item.kind}_grid_thw"].reshape(-1, 3).tolist())
        merged_patches = yield from self.tower.run(
            torch.cat(pixels), [grid for item_grids in each for grid in item_grids]
        )
        tokens: Tensor = self.projector(
            self.norm(merged_patches.flatten(0, 1)).view(len(merged_patches), -1)
        )
        merged = self.config.vision.merged
        counts = [
            sum(rows * columns for _, rows, columns in item_grids) // merged for item_grids in each
        ]
        return tokens.split(counts)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [_KNOWN],
            "model_type": "kimi_k25",
            "image_token_id": 480,
            "video_token_id": 481,
            "tie_word_embeddings": False,
            "projection_hidden_size": 32,
            "text_config": _tiny_text(),
            "vision_config": {
                "model_type": "kimi_k25_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
                "pos_emb_height": 6,
                "pos_emb_width": 6,
                "pos_emb_time": 4,
            },
        }


class KimiK25ForConditionalGeneration(KimiVLForConditionalGeneration):
    """Kimi K2.5: images, and videos as short clips."""

    media = ("image", "video")


def _turned(heads: int, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Reorder query and key weights from interleaved to half-split rotary dimensions."""
    q, k, v = tensor.chunk(3)
    pair = [part.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) for part in (q, k)]
    return [(name.replace(".wqkv.", ".attn.qkv."), torch.cat([*pair, v]))]


def _tiny_text() -> dict[str, Any]:
    """A tiny DeepSeek-V3 with one dense layer and one with experts."""
    return tiny_text(
        "deepseek_v3",
        num_hidden_layers=2,
        num_key_value_heads=4,
        q_lora_rank=40,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    )
