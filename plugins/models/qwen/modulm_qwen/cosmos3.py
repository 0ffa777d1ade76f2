"""Cosmos 3: Qwen3-VL, in files that also hold what generates images, video, sound and actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.nn import WeightNames
from modulm_qwen.vl import Qwen3VLForConditionalGeneration, QwenVLConfig

__all__ = ["Cosmos3Config", "Cosmos3ForConditionalGeneration"]

_ARCHITECTURE = "Cosmos3OmniForConditionalGeneration"
#: Names in files where the parts that read have no prefixes, and attention is named otherwise.
_FLAT = (
    (r"^(layers|embed_tokens|norm)\.", r"model.\1."),
    (r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.", r"visual.\1."),
    (r"\.self_attn\.to_(q|k|v)\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.norm_(q|k)\.", r".self_attn.\1_norm."),
)
#: Of what generates.
_GENERATING = (
    "moe_gen",
    r"\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.",
    r"^(proj_(in|out)|time_embedder|(audio|action)_(proj_in|proj_out|modality_embed))\b",
)


@frozen(eq=False, kw_only=True)
class Cosmos3Config(QwenVLConfig):
    """config.json of Cosmos 3."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        return super().from_table({**table, "architectures": [_ARCHITECTURE]}, file)


class Cosmos3ForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Cosmos 3, answering in text."""

    config_type: ClassVar[type] = Cosmos3Config

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=(*_FLAT, *names.rename), ignore=(*_GENERATING, *names.ignore))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        return {**table, "architectures": [_ARCHITECTURE], "model_type": "cosmos3_omni"}
