"""Aya Vision (arXiv 2505.08751): SigLIP on tiles, with squares of patches merged into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Identity, Module

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_layers import activation, size
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TowerConfig,
    flat_patches,
    pixel_shuffle,
    stacked,
    tiny_text,
)

__all__ = ["AyaVisionConfig", "AyaVisionForConditionalGeneration", "GatedProjector"]


@frozen(kw_only=True)
class _Keys:
    downsample_factor: int = size(2)
    adapter_layer_norm_eps: float = 1e-6
    alignment_intermediate_size: int | None = size(None)


@frozen(eq=False, kw_only=True)
class AyaVisionConfig(MultimodalConfig):
    """config.json of Aya Vision. layer: the tower layer whose states are used."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    layer: int = -1

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        layer, strategy = keys["vision_feature_layer"], keys["vision_feature_select_strategy"]
        if type(layer) is not int or strategy != "full":
            raise CheckpointError(
                f"{file}: vision_feature_layer: not supported yet: {layer!r} with {strategy!r}"
            )
        return {"layer": layer}


class GatedProjector(Module):
    """A gated projection whose first half is the value, the second the gate."""

    def __init__(self, config: Any, b: Builder, *, normed: bool) -> None:
        super().__init__()
        keys, hidden = config.top_level, config.hidden_size
        inputs = config.vision.hidden_size * keys.downsample_factor**2
        inner = keys.alignment_intermediate_size or hidden
        self.norm: Module = Identity()
        if normed:
            self.norm = b.layer_norm("layernorm", inputs, keys.adapter_layer_norm_eps)
        self.up = b.linear("linear_1", inputs, inner, bias=True, split=False)
        self.act = activation("silu", b.ops)
        self.down = b.linear("linear_2", inner // 2, hidden, bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs] -> [tokens, hidden]."""
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = self.down(self.act(gate.contiguous()) * value)
        return out


class AyaVisionForConditionalGeneration(MultimodalModel):
    """Aya Vision; the text model is Command R7B."""

    api = 1
    config_type: ClassVar[type] = AyaVisionConfig
    names = WeightNames(
        rename=((r"^vision_tower\.vision_model\.", "vision_tower."),),
        ignore=(r"^vision_tower\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )

    def make_encoders(self, config: AyaVisionConfig, b: Builder) -> None:
        self.tower = ClipTower(config.vision, b.at("vision_tower"))
        self.projector = GatedProjector(config, b.at("multi_modal_projector"), normed=True)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.states_of(pixels)
        side = self.config.vision.image_size // self.config.vision.patch_size
        grid = states.reshape(len(states), side, side, -1)
        squares = pixel_shuffle(grid, self.config.top_level.downsample_factor)
        each = squares.shape[1] * squares.shape[2]
        tokens = self.projector(squares.flatten(0, 2))
        return list(tokens.split([count * each for count in counts]))

    def states_of(self, pixels: Tensor) -> Pieces[Tensor]:
        """The states of the selected tower layer: [n, patches, width]."""
        (states,) = yield from self.tower.states(pixels, [self.config.layer])
        return states

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["AyaVisionForConditionalGeneration"],
            "model_type": "aya_vision",
            "image_token_index": 480,
            "downsample_factor": 2,
            "alignment_intermediate_size": 48,
            "text_config": tiny_text("cohere2", sliding_window=12, head_dim=16, logit_scale=1.0),
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
            },
        }
