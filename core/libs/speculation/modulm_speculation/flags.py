"""Flags of speculative decoding, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["SpeculationConfig"]


@flag_group
class SpeculationConfig(FlagGroup):
    """Drafting tokens and verifying several in one step, which does not change the output."""

    title = "SpeculativeConfig"

    speculative: str | None = flag(
        None,
        "auto: use the checkpoint's MTP layer if it has one, else drafts from repeated text, and "
        "tokens that a grammar determines. By default on platforms where it was measured (CPUs), "
        "for weights of at least 256 MB. Ignored if a drafter is named.",
        choices=("off", "auto"),
    )
    speculative_config: Mapping[str, Any] = flag(
        {},
        "Drafter and its options: `method`, `num_speculative_tokens` (maximum per sequence and "
        "step), `adaptive` (false: always draft the maximum), `model`, and options of the "
        "method. Method `custom` takes a class as `model`.",
        aliases=("-sc",),
    )
    spec_method: str | None = flag(
        None, "Drafter; short for `method` of --speculative-config.", kind="speculators"
    )
    spec_model: str | None = flag(
        None, "Model of the drafter; short for `model` of --speculative-config."
    )
    spec_tokens: int | None = flag(
        None, "Maximum number of drafted tokens; short for `num_speculative_tokens` of "
            "--speculative-config.",
        least=1,
    )  # fmt: skip
