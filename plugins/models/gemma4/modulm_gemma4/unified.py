"""Gemma 4 12B: pixels and samples go into the text model without encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_gemma4.attention import UnitNorm
from modulm_gemma4.config import Gemma4Config
from modulm_gemma4.gemma4 import Gemma4ForCausalLM
from modulm_gemma4.vision import Gemma4ForConditionalGeneration, patches_of
from modulm_layers import size, tiny_config
from modulm_towers import MultimodalConfig, tiny_text

__all__ = [
    "Gemma4UnifiedConfig",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "Gemma4UnifiedTextConfig",
]

_EPS = 1e-5


@frozen(kw_only=True)
class Gemma4UnifiedTextConfig(Gemma4Config):
    """The text model's keys: Gemma 4's, without inputs of single layers."""

    hidden_size_per_layer_input: int = size(0, least=0)
    sliding_window: int | None = size(1024)
    max_position_embeddings: int = size(262144)
    use_bidirectional_attention: str | None = "vision"


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The text model of Gemma 4 12B."""

    config_type = Gemma4UnifiedTextConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("gemma4_unified_text", "Gemma4UnifiedForCausalLM", **_TEXT)


@frozen(kw_only=True)
class _SightConfig:
    """`vision_config`. mm_embed_dim: width of a patch's vector; mm_posemb_size: of positions."""

    patch_size: int = size(16)
    pooling_kernel_size: int = size(3)
    mm_embed_dim: int = size(3840)
    mm_posemb_size: int = size(1120)
    rms_norm_eps: float = 1e-6

    @property
    def values(self) -> int:
        """Values of a patch: its pixels in three colors."""
        return 3 * (self.patch_size * self.pooling_kernel_size) ** 2


@frozen(kw_only=True)
class _HearingConfig:
    """`audio_config`. audio_embed_dim: samples of a token."""

    audio_embed_dim: int = size(640)
    rms_norm_eps: float = 1e-6


@frozen(eq=False, kw_only=True)
class Gemma4UnifiedConfig(MultimodalConfig):
    """config.json of Gemma 4 12B."""

    vision_type: ClassVar[type] = _SightConfig
    audio_type: ClassVar[type | None] = _HearingConfig


class Gemma4UnifiedForConditionalGeneration(Gemma4ForConditionalGeneration):
    """Gemma 4 12B: a patch or 40 milliseconds of sound become a token by linear layers."""

    config_type: ClassVar[type] = Gemma4UnifiedConfig
    media = ("image", "video", "audio")
    names = WeightNames(
        rename=(
            (r"^model\.(embed_vision|embed_audio)\b", r"\1"),
            (
                r"^embed_vision\.embedding_projection\.",
                "embed_vision.multimodal_embedder.embedding_projection.",
            ),
            (r"^vision_embedder\.", "embed_vision."),
        )
    )
    positions: Tensor

    @classmethod
    def spans(cls, config: Any) -> bool | Literal["windows"]:
        return bool(config.text.text.use_bidirectional_attention == "vision")

    def make_encoders(self, config: Gemma4UnifiedConfig, b: Builder) -> None:
        sight, hearing, hidden = config.vision, config.audio, config.hidden_size
        width, at = sight.mm_embed_dim, b.at("embed_vision")
        self.takes_embeds = self.text.takes_embeds
        self.before = at.layer_norm("patch_ln1", sight.values, _EPS)
        self.patch = at.linear("patch_dense", sight.values, width, bias=True, split=False)
        self.between = at.layer_norm("patch_ln2", width, _EPS)
        at.parameter("pos_embedding", self, "positions", (sight.mm_posemb_size, 2, width))
        self.after = at.layer_norm("pos_norm", width, _EPS)
        self.norms = torch.nn.ModuleList(
            [UnitNorm(sight.rms_norm_eps), UnitNorm(hearing.rms_norm_eps)]
        )
        name = "embedding_projection"
        self.seen = at.at("multimodal_embedder").linear(name, width, hidden, split=False)
        samples = hearing.audio_embed_dim
        self.heard = b.at("embed_audio").linear(name, samples, hidden, split=False)

    def features(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return [
            self._embed_audio(item) if item.kind == "audio" else self._embed_image(item)
            for item in items
        ]

    def _embed_image(self, item: MediaItem) -> Tensor:
        frames = patches_of(self, item)
        pixels, coordinates = (torch.cat(part) for part in zip(*frames, strict=True))
        x = self.between(self.patch(self.before(pixels)))
        x = x + self.positions[coordinates[:, 0], 0] + self.positions[coordinates[:, 1], 1]
        seen: Tensor = self.seen(self.norms[0](self.after(x)))
        return seen

    def _embed_audio(self, item: MediaItem) -> Tensor:
        inside = torch.from_numpy(item.tensors["input_features_mask"][0].astype(bool))
        samples = self.tensor(item, "input_features")[0][inside.to(self.device)]
        heard: Tensor = self.heard(self.norms[1](samples))
        return heard

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "text_config": tiny_text(
                "gemma4_unified_text",
                **{**_TEXT, "sliding_window": 80},
                max_position_embeddings=512,
                use_bidirectional_attention="vision",
            ),
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "patch_size": 2,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 64,
                "mm_posemb_size": 40,
                "output_proj_dims": 64,
            },
            "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640},
        }


_TEXT: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
