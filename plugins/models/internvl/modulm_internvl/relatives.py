"""Eagle 2.5, H2OVL and NVLM-D: InternVL's tiles with another encoder, projector or text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import frozen
from torch.nn import Module

from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_internvl.chat import InternVLChatConfig, InternVLChatModel
from modulm_internvl.internvl import InternVLConfig
from modulm_layers import PlainMLP, only
from modulm_towers import ClipTower, TextConfig, TowerConfig, flat_patches, tiny_text

__all__ = [
    "EagleConfig",
    "EagleForConditionalGeneration",
    "H2OvlConfig",
    "H2OvlModel",
    "NvlmDConfig",
    "NvlmDModel",
]

#: What transformers has for keys of SigLIP that files omit.
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


@frozen(kw_only=True)
class _Keys:
    """Top-level keys. mlp_connector_layers: linear layers of the projector."""

    downsample_ratio: float = 0.5
    select_layer: int = -1
    mlp_connector_layers: int = 2
    use_pixel_shuffle: bool = True
    projector_hidden_act: str = "gelu"

    def __attrs_post_init__(self) -> None:
        only(self, select_layer=(-1,), mlp_connector_layers=(2,), use_pixel_shuffle=(True,))


@frozen(eq=False, kw_only=True)
class EagleConfig(InternVLConfig):
    """config.json of Eagle 2.5."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        vision = {**_SIGLIP, **vision}
        if side := table.get("force_image_size"):
            vision["image_size"] = side
        return cls(
            text=TextConfig.from_table(table, file, cls.text_ignored),
            vision=read_config(vision, TowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class EagleForConditionalGeneration(InternVLChatModel):
    """Eagle 2.5: SigLIP before Qwen 2.5. Only images."""

    config_type = EagleConfig
    media = ("image",)
    names = WeightNames(
        rename=(
            (r"^vision_model\.vision_model\.", "vision_model."),
            (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
            (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
            (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
        ),
        ignore=(r"^vision_model\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )

    def make_tower(self, config: EagleConfig, b: Builder) -> Any:
        return ClipTower(config.vision, b.at("vision_model"))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Eagle2_5_VLForConditionalGeneration"],
            "model_type": "eagle_2_5_vl",
            "downsample_ratio": 0.5,
            "image_token_index": 480,
            "max_dynamic_patch": 4,
            "min_dynamic_patch": 1,
            "select_layer": -1,
            "use_thumbnail": True,
            "text_config": {**tiny_text("qwen2"), "tie_word_embeddings": False},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
            },
        }


@frozen(eq=False, kw_only=True)
class NvlmDConfig(InternVLChatConfig):
    """config.json of NVLM-D."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text = table.get("llm_config") or table.get("text_config")
        return super().from_table({**table, "llm_config": text}, file)


class NvlmDModel(InternVLChatModel):
    """NVLM-D 72B (arXiv 2409.11402): a wide projector without biases. Only images."""

    config_type = NvlmDConfig
    media = ("image",)

    def make_projector(self, config: Any, inputs: int, b: Builder) -> Module:
        return PlainMLP(
            b, inputs, config.text.text.intermediate_size, "gelu", bias=False,
            up="linear_1", down="linear_2", outputs=config.hidden_size,
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "architectures": ["NVLM_D"], "model_type": "NVLM_D"}


@frozen(eq=False, kw_only=True)
class H2OvlConfig(InternVLChatConfig):
    """config.json of H2OVL Mississippi."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        if table.get("use_msac", False):
            raise UnsupportedError(
                "use_msac: not supported yet: true (tiles at two scales); set it to false in "
                "config.json for tiles at one scale"
            )
        return super().from_table(table, file)


class H2OvlModel(InternVLChatModel):
    """H2OVL Mississippi 0.8B (arXiv 2410.13611), with Danube as text model. Only images."""

    config_type = H2OvlConfig
    media = ("image",)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["H2OVLChatModel"], "model_type": "h2ovl_chat"}
        return {**super().tiny(), **names, "use_msac": False}
