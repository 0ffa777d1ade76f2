"""BAGEL (arXiv 2505.14683) for understanding: SigLIP before Qwen 2.5 with normed queries and keys.

The parts that generate images are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, Rewrite, WeightNames, read_config
from modulm_layers import PlainMLP, PreNormLayer, only, size, standard_attention, standard_mlp
from modulm_qwen.qwen2 import Qwen2Config, Qwen2ForCausalLM
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    TowerConfig,
    stacked,
    tiny_text,
)

__all__ = ["BagelConfig", "BagelForConditionalGeneration", "BagelTextForCausalLM"]

#: Layers that files say they have, and those that they have.
_SAID, _STORED = 27, 26
_GENERATES = (
    r"(^|[._])moe_gen([._]|$)", r"^latent_pos_embed\.", r"^(llm2vae|vae2llm|time_embedder)\.",
    r"^(encoder|decoder)\.",
)  # fmt: skip


@frozen(kw_only=True)
class _TextConfig(Qwen2Config):
    """`llm_config`. qk_norm: whether heads of queries and keys are normed."""

    qk_norm: bool = True


class _Layer(PreNormLayer):
    """Qwen 2's block, with a norm per head of queries and keys."""

    def __init__(self, c: _TextConfig, b: Builder, index: int) -> None:
        at, norms = b.at("self_attn"), None
        if c.qk_norm:
            names = ("q_norm", "k_norm")
            norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in names)
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, bias=True, out_bias=False, qk_norm=norms),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class BagelTextForCausalLM(Qwen2ForCausalLM):
    """BAGEL's text model; it is not registered."""

    config_type = _TextConfig
    layer = _Layer


@frozen(kw_only=True)
class _Keys:
    """Top-level keys. vit_max_num_patch_per_side: of the table of positions."""

    connector_act: str = "gelu_pytorch_tanh"
    interpolate_pos: bool = False
    visual_und: bool = True
    vit_max_num_patch_per_side: int = size(70)

    def __attrs_post_init__(self) -> None:
        only(self, interpolate_pos=(False,), visual_und=(True,))


@frozen(eq=False, kw_only=True)
class BagelConfig(MultimodalConfig):
    """config.json of BAGEL."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = table.get("llm_config"), table.get("vit_config")
        for key, part in (("llm_config", text), ("vit_config", vision)):
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        known = {
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            **(vision or {}),
            "model_type": "siglip_vision_model",
        }
        if known.get("num_hidden_layers") == _SAID:
            known["num_hidden_layers"] = _STORED
        keys = {**(text or {}), "model_type": "qwen2"}
        inner = read_config(keys, _TextConfig, file)
        return cls(
            text=TextConfig(BagelTextForCausalLM, inner, "BagelForConditionalGeneration"),
            vision=read_config(known, TowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class BagelForConditionalGeneration(MultimodalModel):
    """BAGEL 7B: every patch of an image is a token."""

    api = 1
    config_type: ClassVar[type] = BagelConfig

    def make_encoders(self, config: BagelConfig, b: Builder) -> None:
        vision, hidden = config.vision, config.hidden_size
        self.tower = ClipTower(vision, b.at("vit_model"))
        self.connector = PlainMLP(
            b.at("connector"), vision.hidden_size, hidden, config.top_level.connector_act,
            up="fc1", down="fc2", outputs=hidden,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        side = self.config.vision.image_size // self.config.vision.patch_size
        tokens = self.connector(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        tokens = tokens + _sines(side, tokens.shape[-1]).to(tokens.device, tokens.dtype)
        return [part.flatten(0, 1) for part in tokens.split(counts)]

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        unfold = partial(_channels_first, config.vision.patch_size)
        return evolve(
            names,
            rename=((r"^vit_model\.vision_model\.", "vit_model."), *names.rename),
            ignore=(
                *_GENERATES, r"^vit_pos_embed\.", r"^vit_model\.(head\.|embeddings\.position_ids)",
                *names.ignore,
            ),
            rewrite=(Rewrite(r"\.patch_embedding\.weight$", unfold), *names.rewrite),
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["BagelForConditionalGeneration"],
            "model_type": "bagel",
            "vit_max_num_patch_per_side": 4,
            "llm_config": {**tiny_text("qwen2"), "qk_norm": True, "tie_word_embeddings": False},
            "vit_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
            },
        }


def _channels_first(patch: int, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Patches stored as [rows, columns, channels] become [channels, rows, columns]."""
    if tensor.dim() == 2:
        tensor = tensor.reshape(len(tensor), patch, patch, -1).permute(0, 3, 1, 2)
    return [(name, tensor.reshape(len(tensor), -1))]


def _sines(side: int, width: int) -> Tensor:
    """[side * side, width] float32: sines and cosines of the column, then those of the row."""
    waves = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    angles = torch.arange(side)[:, None] * waves
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns = line.expand(side, side, -1)
    rows = line[:, None].expand(side, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()
