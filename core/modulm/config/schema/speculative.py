"""Tokens guessed ahead and checked by the model in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later

__all__ = ["SpeculativeConfig"]

_LATER = later("guessing tokens ahead")


@frozen(kw_only=True, field_transformer=equip)
class SpeculativeConfig:
    """Tokens guessed ahead and checked by the model in one step."""

    TITLE: ClassVar[str] = "SpeculativeConfig"
    TABLE: ClassVar[str | None] = None

    speculative_config: Mapping[str, Any] | None = flag(
        None, "How tokens are guessed, as JSON.", aliases=("-sc",), state=_LATER
    )
    spec_method: str | None = flag(
        None, "How tokens are guessed.", kind="speculators", state=_LATER
    )
    spec_model: str | None = flag(None, "Model that guesses.", state=_LATER)
    spec_tokens: int | None = flag(
        None, "Tokens guessed per step.", unit="tokens", least=1, state=_LATER
    )
    diffusion_config: Mapping[str, Any] | None = flag(
        None, "How a diffusion model denoises.", aliases=("-dc",), state=later("diffusion models")
    )
    engram_config: Mapping[str, Any] | None = flag(
        None, "Where memory tables are kept.", state=later("models with memory tables")
    )
    watermark_config: Mapping[str, Any] | None = flag(
        None, "How text is watermarked.", state=later("watermarked text")
    )
    aux_output_config: Mapping[str, Any] = flag(
        {}, "What is returned besides tokens.", state=later("auxiliary outputs")
    )
