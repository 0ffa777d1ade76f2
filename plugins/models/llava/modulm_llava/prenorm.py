"""Bee (Open-Bee) and R-4B: LLaVA-OneVision before Qwen 3, with a norm in front of the projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import frozen
from torch.nn import Module, Sequential

from modulm.nn import Builder
from modulm_layers import PlainMLP
from modulm_llava.onevision import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from modulm_towers import tiny_text

__all__ = ["BeeForConditionalGeneration", "PreNormConfig", "RForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class PreNormConfig(LlavaOnevisionConfig):
    """config.json of Bee and R-4B: LLaVA-OneVision's keys under a model type of their own."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        name = "LlavaOnevisionForConditionalGeneration"
        return super().from_table(
            {**table, "architectures": [name], "model_type": "llava_onevision"}, file
        )


class RForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """R-4B."""

    config_type = PreNormConfig
    media = ("image",)
    #: The width between the projector's two layers, in widths of the text model.
    inner: ClassVar[int] = 1

    def make_projector(self, config: PreNormConfig, b: Builder) -> Module:
        inputs, hidden = config.vision.hidden_size * len(config.layers), config.hidden_size
        return Sequential(
            b.layer_norm("pre_norm", inputs, 1e-6),
            PlainMLP(
                b, inputs, hidden * self.inner, config.top_level.projector_hidden_act,
                up="linear_1", down="linear_2", outputs=hidden,
            ),
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["RForConditionalGeneration"],
            "model_type": "R",
            "text_config": tiny_text("qwen3", head_dim=16),
        }


class BeeForConditionalGeneration(RForConditionalGeneration):
    """Bee 8B."""

    inner = 4

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["BeeForConditionalGeneration"], "model_type": "bee"}
        return {**super().tiny(), **names}
