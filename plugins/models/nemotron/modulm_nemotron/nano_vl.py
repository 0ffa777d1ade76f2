"""Nemotron Nano VL 2 and Llama Nemotron Nano VL: RADIO on tiles, before Nemotron-H or Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.errors import CheckpointError
from modulm.nn import Builder
from modulm_layers import PlainMLP
from modulm_nemotron.nemotron_h import NemotronHForCausalLM
from modulm_nemotron.omni import (
    PATCHES,
    NemotronOmniConfig,
    NemotronOmniForConditionalGeneration,
    RadioTower,
)
from modulm_towers import tiny_text

__all__ = ["LlamaNemotronNanoVL", "NanoVlConfig", "NemotronNanoVL"]

#: Names of encoders in timm: (width, layers, heads, inner width).
_SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "vit_small_patch16_224": (384, 12, 6, 1536),
    "vit_base_patch16_224": (768, 12, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 16, 4096),
    "vit_huge_patch16_224": (1280, 32, 16, 5120),
}
_EPS = 1e-5


@frozen(eq=False, kw_only=True)
class NanoVlConfig(NemotronOmniConfig):
    """config.json of Nemotron Nano VL; `vision_config` has the arguments of RADIO's training."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        arguments = vision.get("args")
        if isinstance(arguments, Mapping):
            vision = _encoder(arguments, table, file)
        return super().from_table({**table, "vision_config": vision}, file)


def _encoder(arguments: Mapping[str, Any], table: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The encoder's configuration from the arguments of its training."""
    model = arguments.get("model")
    if model not in _SHAPES:
        raise CheckpointError(f"{file}: vision_config: args: model: unknown {model!r}")
    hidden, layers, heads, inner = _SHAPES[str(model)]
    teachers = {teacher["name"] for teacher in arguments.get("teachers") or ()}
    summaries = len(teachers) if arguments.get("cls_token_per_teacher") and teachers else 1
    multiple = int(arguments.get("register_multiple") or 0)
    return {
        "model_type": "radio",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "mlp_ratio": inner / hidden,
        "patch_size": int(table.get("patch_size") or 16),
        "max_img_size": int(arguments.get("cpe_max_size") or 2048),
        "num_cls_tokens": summaries,
        "num_registers": multiple - summaries % multiple if multiple else 0,
        "video_temporal_patch_size": 2,
    }


#: Of files that have more than is used of them here.
_NAMES = evolve(
    NemotronOmniForConditionalGeneration.names,
    ignore=(
        *NemotronOmniForConditionalGeneration.names.ignore,
        r"^(sound_encoder|sound_projection)\.",
        r"\.patch_generator\.video_embedder\.",
    ),
)


class NemotronNanoVL(NemotronOmniForConditionalGeneration):
    """Nemotron Nano VL 2, of images."""

    config_type: ClassVar[type] = NanoVlConfig
    media = ("image",)
    names = _NAMES

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = dict(NemotronHForCausalLM.tiny())
        del text["architectures"]
        return {**_tiny("NemotronH_Nano_VL_V2"), "llm_config": text}


class LlamaNemotronNanoVL(NemotronOmniForConditionalGeneration):
    """Llama Nemotron Nano VL, of images."""

    config_type: ClassVar[type] = NanoVlConfig
    media = ("image",)
    names = _NAMES

    def make_encoders(self, config: NanoVlConfig, b: Builder) -> None:
        self.tower = RadioTower(config.vision, b.at("vision_model.radio_model.model"))
        at, wide = b.at("mlp1"), config.vision.hidden_size * PATCHES
        self.norm = at.layer_norm("0", wide, _EPS)
        inner = config.top_level.projector_hidden_size
        self.projector = PlainMLP(
            at, wide, inner, "gelu", up="1", down="3", outputs=config.hidden_size
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**_tiny("Llama_Nemotron_Nano_VL"), "llm_config": tiny_text("llama")}


def _tiny(architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": architecture,
        "force_image_size": 16,
        "patch_size": 4,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "vit_hidden_size": 32,
        "projector_hidden_size": 48,
        "vision_config": {
            "model_type": "radio",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mlp_ratio": 1.5,
            "patch_size": 4,
            "max_img_size": 32,
            "num_cls_tokens": 1,
            "num_registers": 3,
            "video_temporal_patch_size": 2,
        },
    }
