"""Llama Nemotron embed and rerank VL: SigLIP's patches before a Llama that sees whole prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, only, size
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    TowerConfig,
    flat_patches,
    pixel_shuffle,
    stacked,
    tiny_text,
)

__all__ = ["LlamaNemotronVLForSequenceClassification", "LlamaNemotronVLModel"]

_EPS = 1e-5


@frozen(kw_only=True)
class _Keys:
    """Top-level keys. downsample_ratio: inverse of the side of a token in patches."""

    downsample_ratio: float = 0.5
    projector_hidden_size: int = size(4096)
    ps_version: str = "v2"
    select_layer: int = -1

    def __attrs_post_init__(self) -> None:
        only(self, downsample_ratio=(0.5,), ps_version=("v2",), select_layer=(-1,))

    @property
    def merged(self) -> int:
        """Patches along the side of a token."""
        return round(1 / self.downsample_ratio)


def _tables(
    table: Mapping[str, Any], file: str, model_type: str
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(`llm_config`, `vision_config`) of config.json. Raises CheckpointError."""
    text, vision = table.get("llm_config") or table.get("text_config"), table.get("vision_config")
    for key, part in (("llm_config", text), ("vision_config", vision)):
        if not isinstance(part, Mapping):
            raise CheckpointError(f"{file}: {key}: must be a table")
    return {"model_type": model_type, **(text or {})}, vision or {}


@frozen(eq=False, kw_only=True)
class LlamaNemotronVLConfig(MultimodalConfig):
    """config.json of Llama Nemotron embed and rerank VL."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = _tables(table, file, "llama_bidirec")
        known = {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            **vision,
        }
        if side := table.get("force_image_size"):
            known["image_size"] = side
        width = known.get("hidden_size", 1152)
        keys = {"projector_hidden_size": text.get("hidden_size", width), **table}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            vision=read_config(known, TowerConfig, file),
            top_level=read_config(keys, _Keys, file),
        )


class LlamaNemotronVLModel(MultimodalModel):
    """Llama Nemotron embed VL 1B v2: vectors of texts and of pages, by a Llama that sees whole
    prompts.
    """

    api = 1
    config_type: ClassVar[type] = LlamaNemotronVLConfig
    tasks = ("embed", "token_embed")

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = ClipTower(config.vision, b.at("vision_model"))
        self.merged, at = config.top_level.merged, b.at("mlp1")
        inputs = config.vision.hidden_size * self.merged**2
        self.norm = at.layer_norm("0", inputs, _EPS)
        self.projector = PlainMLP(
            at, inputs, config.top_level.projector_hidden_size, "gelu", up="1", down="3",
            outputs=config.hidden_size,
        )  # fmt: skip

    @property
    def pooling(self) -> str:
        return "MEDIA" if self.only_encodes else str(self.text.pooling)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        side = self.config.vision.image_size // self.config.vision.patch_size
        squares = pixel_shuffle(states.view(len(pixels), side, side, -1), self.merged)
        each = squares.shape[1] * squares.shape[2]
        tokens: Tensor = self.projector(self.norm(squares.flatten(0, 2)))
        return tokens.split([count * each for count in counts])

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        text: WeightNames = config.text.driver.weights(config.text.text)
        return evolve(
            text,
            rename=(
                (r"^model\.(?=vision_model\.|mlp1\.|language_model\.)", ""),
                (r"^vision_model\.vision_model\.", "vision_model."),
                (r"^language_model\.(model\.)?", "model."),
            ),
            ignore=(
                r"^vision_model\.(head\.|embeddings\.position_ids)", r"^(model\.)?lm_head\.",
                r"^model\.score\.",
            ),
            rewrite=(flat_patches(r"\.patch_embedding\.weight$"), *text.rewrite),
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["LlamaNemotronVLModel"],
            "model_type": "llama_nemotron_vl",
            "downsample_ratio": 0.5,
            "force_image_size": 28,
            "max_dynamic_patch": 4,
            "llm_config": {**tiny_text("llama_bidirec"), "pooling": "avg", "is_causal": False},
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


class LlamaNemotronVLForSequenceClassification(LlamaNemotronVLModel):
    """Llama Nemotron rerank VL 1B v2: the score of a question and a text or page."""

    tasks = ("classify", "token_classify")

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)
        classes = config.text.text.classes
        self.score = b.linear("score", config.hidden_size, classes, split=False)

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = hidden if self.only_encodes else self.score(hidden)
        return scores

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table, name = super().tiny(), "LlamaNemotronVLForSequenceClassification"
        text = {**table["llm_config"], "num_labels": 3}
        return {**table, "architectures": [name], "llm_config": text}
