"""Flags of speculative decoding, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["SpeculationConfig"]


@flag_group
class SpeculationConfig(FlagGroup):
    """Tokens are drafted, and several verified in one step; no answer changes."""

    title = "SpeculativeConfig"

    speculative_config: Mapping[str, Any] = flag(
        {},
        "Which speculator, and its options: `method`, `num_speculative_tokens` (most for a row and "
        "step), `adaptive` (false: always as many), `model`, and what the method takes. Method "
        "`custom` takes a class as `model`.",
        aliases=("-sc",),
    )
    spec_method: str | None = flag(
        None, "Speculator; short for `method` of --speculative-config.", kind="speculators"
    )
    spec_model: str | None = flag(None, "Its model; short for `model` of --speculative-config.")
    spec_tokens: int | None = flag(
        None, "Most drafted tokens; short for `num_speculative_tokens` of --speculative-config.",
        least=1,
    )  # fmt: skip
