"""Phi-4 reasoning vision: SigLIP 2 with native aspect ratios before Phi 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, tiny_config
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    NaflexTower,
    Pieces,
    Siglip2VisionConfig,
    TextConfig,
)

__all__ = ["Phi4VisionConfig", "Phi4VisionForCausalLM"]


@frozen(eq=False, kw_only=True)
class Phi4VisionConfig(MultimodalConfig):
    """config.json of Phi-4 reasoning vision: Phi 3's keys beside `vision_config`."""

    vision_type: ClassVar[type] = Siglip2VisionConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        config = read_config(vision, Siglip2VisionConfig, file)
        if table.get("mm_hidden_size", config.hidden_size) != config.hidden_size:
            raise CheckpointError(
                f"{file}: mm_hidden_size: {table['mm_hidden_size']}, while "
                f"vision_config.hidden_size is {config.hidden_size}"
            )
        if config.num_hidden_layers < 2:
            raise CheckpointError(f"{file}: vision_config.num_hidden_layers: must be at least 2")
        text = {key: value for key, value in table.items() if key != "vision_config"}
        text["model_type"] = "phi3"
        return cls(text=TextConfig.from_table({**table, "text_config": text}, file), vision=config)


class Phi4VisionForCausalLM(MultimodalModel):
    """Phi-4 reasoning vision 15B: each patch is a token."""

    api = 1
    config_type: ClassVar[type] = Phi4VisionConfig

    def make_encoders(self, config: Phi4VisionConfig, b: Builder) -> None:
        vision = config.vision
        self.tower = NaflexTower(vision, b.at("sight"), inner=True)
        self.projector = PlainMLP(
            b.at("mm_projector"), vision.hidden_size, config.hidden_size, "gelu",
            up="0", down="2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        grids = [item.tensors["spatial_shapes"].reshape(-1).tolist() for item in items]
        counts = [rows * columns for rows, columns in grids]
        pixels = [
            self.tensor(item, "pixel_values")[0, :count]
            for item, count in zip(items, counts, strict=True)
        ]
        states = yield from self.tower.run(torch.cat(pixels), grids)
        tokens: Tensor = self.projector(states)
        per_item: Sequence[Tensor] = tokens.split(counts)  # type: ignore[no-untyped-call]
        return per_item

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        last = config.vision.num_hidden_layers - 1
        rename = (
            (r"^model\.vision_tower\.vision_tower\.vision_model\.", "sight."),
            (r"^model\.mm_projector\.", "mm_projector."),
        )
        ignore = (rf"^sight\.(head|post_layernorm|encoder\.layers\.{last})\.",)
        return evolve(names, rename=(*rename, *names.rename), ignore=(*ignore, *names.ignore))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("phi3", "Phi4ForCausalLMV"),
            "model_type": "phi4-siglip",
            "mm_hidden_size": 32,
            "min_num_patches": 12,
            "max_num_patches": 24,
            "tie_word_embeddings": False,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_patches": 16,
                "patch_size": 4,
            },
        }
