"""CLIP (arXiv 2103.00020): vectors of texts and images in a common space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import size
from modulm_towers import Block, BlockShape, ClipTower, TowerConfig, flat_patches, whole
from modulm_towers.text import complete_config

__all__ = ["CLIPModel", "ClipConfig", "ClipTextConfig", "TextTower"]


@frozen(kw_only=True)
class ClipTextConfig:
    """`text_config` of CLIP and SigLIP."""

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    max_position_embeddings: int = size()
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_size: int | None = size(None)
    pad_token_id: int | None = 1

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")


@frozen(kw_only=True)
class _Keys:
    projection_dim: int = size(512)


@frozen(eq=False, kw_only=True)
class ClipConfig:
    """config.json of CLIP. hidden_size: width of the vectors."""

    top_level_type: ClassVar[type | None] = _Keys
    vision_type: ClassVar[type] = TowerConfig

    text: ClipTextConfig
    vision: Any
    hidden_size: int

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Parse the table. Raises CheckpointError."""
        known = complete_config(str(table["architectures"][0]), table, file)
        if known is None:
            raise UnsupportedError(f"the installed transformers has no {table['architectures'][0]}")
        keys = known.to_dict()
        text = read_config(keys["text_config"], ClipTextConfig, file)
        vision = read_config(keys["vision_config"], cls.vision_type, file)
        return cls(text=text, vision=vision, hidden_size=cls.width(keys, text, vision, file))

    @classmethod
    def width(cls, keys: Mapping[str, Any], text: ClipTextConfig, vision: Any, file: str) -> int:
        """The width of the vectors. Raises CheckpointError."""
        return int(read_config(keys, _Keys, file).projection_dim)

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self.text.vocab_size

    @property
    def max_length(self) -> int:
        """The maximum length of a text in tokens."""
        return self.text.max_position_embeddings

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


class TextTower(Module):
    """Learned positions and pre-norm blocks."""

    positions: Tensor

    def __init__(self, c: ClipTextConfig, b: Builder, *, causal: bool) -> None:
        super().__init__()
        at, hidden = b.at("embeddings"), c.hidden_size
        self.tokens = at.embedding("token_embedding", c.vocab_size, hidden)
        shape = (c.max_position_embeddings, hidden)
        at.parameter("position_embedding.weight", self, "positions", shape)
        block = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps, causal=causal,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), block) for i in layers)
        self.norm = b.layer_norm("final_layer_norm", hidden, c.layer_norm_eps)

    def forward(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """tokens: [n] int64 of rows of these lengths -> [n, hidden]."""
        positions = torch.cat([torch.arange(length) for length in lengths]).to(tokens.device)
        x = self.tokens.lookup(tokens) + self.positions[positions]
        for layer in self.layers:
            x = layer(x, lengths)
        out: Tensor = self.norm(x)
        return out


class CLIPModel(Module, Model):
    """CLIP: an image is a single token whose embedding is the resulting vector."""

    api = 1
    config_type: ClassVar[type] = ClipConfig
    tasks = ("embed",)
    media = ("image",)
    takes_embeds = False

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, build.shared.dtype, build.shared.device
        self.make(config, build)

    def make(self, config: Any, b: Builder) -> None:
        """Build the modules of `vectors` and `pictures`; `b` points at the root."""
        self.text = TextTower(config.text, b.at("text_model"), causal=True)
        self.tower = ClipTower(config.vision, b.at("vision_model"))
        text, vision, width = config.text, config.vision, config.hidden_size
        self.text_out = b.linear("text_projection", text.hidden_size, width, split=False)
        self.vision_out = b.linear("visual_projection", vision.hidden_size, width, split=False)

    def vectors(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """tokens: [n] int64 of rows of these lengths -> [n, width]; only last tokens' vectors are
        used.
        """
        projected: Tensor = self.text_out(self.text(tokens, lengths))
        return projected

    def pictures(self, pixels: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, width]."""
        (states,) = whole(self.tower.states(pixels, [-1]))
        projected: Tensor = self.vision_out(self.tower.post(states[:, 0].contiguous()))
        return projected

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            rename=((r"^(text|vision)_model\.(text|vision)_model\.", r"\1_model."),),
            ignore=(r"position_ids$", r"^logit_(scale|bias)$"),
            rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
        )

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return ()

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        pixels = [torch.from_numpy(item.tensors["pixel_values"]).to(self.device) for item in items]
        return list(self.pictures(torch.cat(pixels).to(self.dtype)).split([1] * len(items)))

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, width]: the vector of an image, or of a text's last token."""
        vectors = torch.zeros(
            len(batch.tokens), self.config.hidden_size, dtype=self.dtype, device=self.device
        )
        mask = batch.embeds_mask
        if batch.embeds is not None and mask is not None:
            vectors[mask] = batch.embeds[mask].to(self.dtype)
        images = torch.zeros(len(vectors), dtype=torch.bool) if mask is None else mask.cpu()
        rows = list(pairwise(batch.query_starts.tolist()))
        texts = [(first, end) for first, end in rows if not images[first]]
        if texts:
            text_indices = torch.cat([torch.arange(*row) for row in texts]).to(self.device)
            lengths = [end - first for first, end in texts]
            vectors[text_indices] = self.vectors(batch.tokens[text_indices], lengths)
        return vectors

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        tower = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        return {
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "projection_dim": 24,
            "text_config": {
                **tower,
                "model_type": "clip_text_model",
                "vocab_size": 512,
                "max_position_embeddings": 40,
                "eos_token_id": 480,
            },
            "vision_config": {
                **tower,
                "model_type": "clip_vision_model",
                "hidden_size": 48,
                "image_size": 28,
                "patch_size": 7,
            },
        }
