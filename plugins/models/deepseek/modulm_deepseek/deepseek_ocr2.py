"""DeepSeek-OCR 2: SAM, learned queries that read its patches, and DeepSeekMoE.

An image becomes one global view and, if it is large, tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_deepseek.deepseek_moe import DeepseekMoEForCausalLM
from modulm_deepseek.queries import QueryConfig, QueryEncoder
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    SamConfig,
    SamTower,
    flat_patches,
    stacked,
    tiny_text,
)

__all__ = ["DeepseekOcr2Config", "DeepseekOcr2ForConditionalGeneration", "SightConfig"]

_SAM = "vision_tower.sam_encoder"


@frozen(kw_only=True)
class SightConfig:
    """`vision_config`."""

    sam_config: SamConfig
    encoder_config: QueryConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Raises CheckpointError."""
        sam = read_config(table["sam_config"], SamConfig, file)
        encoder = read_config(table["encoder_config"], QueryConfig, file)
        if sam.downsample_channels[-1] != encoder.hidden_size:
            raise CheckpointError(
                f"{file}: downsample_channels: {sam.downsample_channels} before an encoder of "
                f"hidden_size {encoder.hidden_size}"
            )
        return cls(sam_config=sam, encoder_config=encoder)


@frozen(eq=False, kw_only=True)
class DeepseekOcr2Config(MultimodalConfig):
    """config.json of DeepSeek-OCR 2."""

    vision_type: ClassVar[type | None] = SightConfig


class DeepseekOcr2ForConditionalGeneration(MultimodalModel):
    """DeepSeek-OCR 2."""

    api = 1
    config_type: ClassVar[type] = DeepseekOcr2Config
    names = WeightNames(
        rename=(
            (r"^model\.(sam_model|qwen2_model|view_sep[ae]rator)\b", r"\1"),
            (r"^view_seperator$", "view_separator"),
            (r"^projector\.layers\.", "multi_modal_projector."),
            (r"^qwen2_model\.query_(768|1024)\.", r"vision_tower.query_\1_resolution."),
            (r"^qwen2_model\.model\.model\.", "vision_tower.vision_encoder."),
            (r"^sam_model\.blocks\.(\d+)\.norm(\d)\.", rf"{_SAM}.layers.\1.layer_norm\2."),
            (r"^sam_model\.blocks\.", f"{_SAM}.layers."),
            (r"^sam_model\.patch_embed\.proj\.", f"{_SAM}.patch_embed.projection."),
            (r"^sam_model\.neck\.0\.", f"{_SAM}.neck.conv1."),
            (r"^sam_model\.neck\.1\.", f"{_SAM}.neck.layer_norm1."),
            (r"^sam_model\.neck\.2\.", f"{_SAM}.neck.conv2."),
            (r"^sam_model\.neck\.3\.", f"{_SAM}.neck.layer_norm2."),
            (r"^sam_model\.net_2\.", f"{_SAM}.proj.conv1."),
            (r"^sam_model\.net_3\.", f"{_SAM}.proj.conv2."),
            (r"^sam_model\.", f"{_SAM}."),
        ),
        rewrite=(flat_patches(r"patch_embed\.projection\.weight$"),),
    )
    separator: Tensor

    def make_encoders(self, config: DeepseekOcr2Config, b: Builder) -> None:
        at, c = b.at("vision_tower"), config.vision
        self.sam = SamTower(c.sam_config, at.at("sam_encoder"))
        self.queries = QueryEncoder(c.encoder_config, at)
        width, hidden = c.encoder_config.hidden_size, config.hidden_size
        self.projector = b.linear("multi_modal_projector", width, hidden, bias=True, split=False)
        b.parameter("view_separator", self, "separator", (hidden,))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        views, _ = stacked(self, items, "pixel_values")
        overviews = yield from self._views(views)
        tiled = [item for item in items if "pixel_values_local" in item.tensors]
        tiles: dict[int, Tensor] = {}
        if tiled:
            pixels, counts = stacked(self, tiled, "pixel_values_local")
            tile_tokens = yield from self._views(pixels)
            parts = zip(tiled, tile_tokens.split(counts), strict=True)
            tiles = {id(item): item_tokens.flatten(0, 1) for item, item_tokens in parts}
        end = self.separator[None]
        return [
            torch.cat([*([tiles[id(item)]] if id(item) in tiles else []), view, end])
            for item, view in zip(items, overviews, strict=True)
        ]

    def _views(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, tokens, hidden of the text model]."""
        read = yield from self.queries.run((yield from self.sam.run(pixels)))
        tokens: Tensor = self.projector(read.flatten(0, 1)).unflatten(0, read.shape[:2])
        return tokens

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = tiny_text("deepseek_ocr2_text", **_experts())
        return {
            "architectures": ["DeepseekOcr2ForConditionalGeneration"],
            "model_type": "deepseek_ocr2",
            "image_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": {**text, "mlp_layer_types": ["dense", "sparse"]},
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16,
                    "output_channels": 8,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 64,
                    "patch_size": 1,
                    "window_size": 14,
                    "global_attn_indexes": [1],
                    "mlp_dim": 24,
                    "downsample_channels": [16, 32],
                },
                "encoder_config": {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                },
            },
        }


def _experts() -> dict[str, Any]:
    """The text model's additional keys, for two layers."""
    tiny = DeepseekMoEForCausalLM.tiny()
    keys = ("num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
            "moe_intermediate_size")  # fmt: skip
    more = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    return {**{key: tiny[key] for key in keys}, **more}
