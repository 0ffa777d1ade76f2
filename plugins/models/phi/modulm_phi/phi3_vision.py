"""Phi-3 and 3.5 vision (arXiv 2404.14219): CLIP on tiles and the whole image, before Phi 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, tiny_config
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    TowerConfig,
    flat_patches,
)

__all__ = ["Phi3VisionConfig", "Phi3VisionForCausalLM"]

#: CLIP's ViT-L/14 for images of 336 pixels, which files name.
_CLIP: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
#: Settings of the embedding of images that are implemented.
_EMBEDDING: Mapping[str, Any] = {
    "use_hd_transform": True,
    "with_learnable_separator": True,
    "hd_transform_order": "sub_glb",
}
#: The side of the square of patches that form a token.
_SIDE = 2


@frozen(eq=False, kw_only=True)
class Phi3VisionConfig(MultimodalConfig):
    """config.json of Phi-3 vision: Phi 3's keys beside `img_processor` and `embd_layer`."""

    layer: int = -2

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        encoder, embedding = table.get("img_processor"), table.get("embd_layer")
        if not isinstance(encoder, Mapping) or not isinstance(embedding, Mapping):
            raise CheckpointError(f"{file}: img_processor, embd_layer: must be tables")
        for key, value in _EMBEDDING.items():
            if embedding.get(key, value) != value:
                raise UnsupportedError(f"embd_layer: {key}: not supported yet: {embedding[key]!r}")
        if encoder.get("type_feature", "patch") != "patch":
            raise UnsupportedError(f"img_processor: type_feature: {encoder['type_feature']!r}")
        sizes = {key: encoder.get(key, value) for key, value in _CLIP.items()}
        text = {**table, "model_type": "phi3"}
        for key in ("img_processor", "embd_layer"):
            del text[key]
        scaling = text.get("rope_scaling")
        if isinstance(scaling, Mapping) and scaling.get("type") == "su":
            text["rope_scaling"] = {**scaling, "type": "longrope"}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            vision=read_config(sizes, TowerConfig, file),
            layer=int(encoder.get("layer_idx", -2)),
        )


class Phi3VisionForCausalLM(MultimodalModel):
    """Phi-3 and 3.5 vision."""

    api = 1
    config_type: ClassVar[type] = Phi3VisionConfig
    between: Tensor
    newline: Tensor

    def make_encoders(self, config: Phi3VisionConfig, b: Builder) -> None:
        self.tower = ClipTower(config.vision, b.at("clip"))
        at, wide = b.at("sight"), config.vision.hidden_size * _SIDE**2
        at.parameter("glb_GN", self, "between", (1, 1, wide))
        at.parameter("sub_GN", self, "newline", (1, 1, 1, wide))
        self.projector = PlainMLP(
            at.at("img_projection"), wide, config.hidden_size, "gelu",
            up="0", down="2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels = [self.tensor(item, "pixel_values") for item in items]
        (states,) = yield from self.tower.states(torch.cat(pixels), [self.config.layer])
        per_item = states[:, 1:].split([len(part) for part in pixels])
        side = self.config.vision.image_size
        embeddings = []
        for item, tiles in zip(items, per_item, strict=True):
            rows, columns = (item.tensors["image_sizes"].reshape(-1) // side).tolist()
            parts = [self._lines(tiles[1:], rows, columns), self.between[0]]
            embeddings.append(self.projector(torch.cat([*parts, self._lines(tiles[:1], 1, 1)])))
        return embeddings

    def _lines(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        """tiles: [rows * columns, patches, hidden] -> [tokens, 4 * hidden], a separator after each
        line of tokens.
        """
        count = round(tiles.shape[1] ** 0.5) // _SIDE
        cut = tiles.reshape(rows, columns, count, _SIDE, count, _SIDE, -1)
        lines = cut.permute(0, 2, 1, 4, 3, 5, 6).reshape(rows * count, columns * count, -1)
        separators = self.newline[0].expand(len(lines), 1, -1)
        return torch.cat([lines, separators], dim=1).flatten(0, 1)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        rename = (
            (r"^model\.vision_embed_tokens\.img_processor\.vision_model\.", "clip."),
            (r"^model\.vision_embed_tokens\.wte\.", "model.embed_tokens."),
            (r"^model\.vision_embed_tokens\.", "sight."),
        )
        return evolve(
            names,
            rename=(*rename, *names.rename),
            ignore=(r"^clip\.embeddings\.position_ids$", *names.ignore),
            rewrite=(flat_patches(r"^clip\.embeddings\.patch_embedding\.weight$"), *names.rewrite),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        }
        return {
            **tiny_config("phi3", "Phi3VForCausalLM"),
            "model_type": "phi3_v",
            "tie_word_embeddings": False,
            "img_processor": {"name": "clip_vision_model", "image_dim_out": 32, **sizes},
            "embd_layer": dict(_EMBEDDING),
        }
