"""Tarsier (arXiv 2407.00634) and Mantis (arXiv 2405.01483): LLaVA with text inside and around
images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from attrs import frozen

from modulm_llava.llava import LlavaConfig, LlavaForConditionalGeneration

__all__ = [
    "LlavaAliasConfig",
    "MantisForConditionalGeneration",
    "TarsierForConditionalGeneration",
]


@frozen(eq=False, kw_only=True)
class LlavaAliasConfig(LlavaConfig):
    """config.json of LLaVA under another architecture."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        name = "LlavaForConditionalGeneration"
        return super().from_table({**table, "architectures": [name], "model_type": "llava"}, file)


class TarsierForConditionalGeneration(LlavaForConditionalGeneration):
    """Tarsier 7B and 34B: a token of text after each row of patches, and one after the last."""

    config_type = LlavaAliasConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["TarsierForConditionalGeneration"]}
        return {**super().tiny(), **names, "image_newline_idx": 481, "image_new_idx": 482}


class MantisForConditionalGeneration(LlavaForConditionalGeneration):
    """Mantis: images are numbered in the text around them."""

    config_type = LlavaAliasConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "architectures": ["MantisForConditionalGeneration"]}
