"""The flag of Anthropic's API."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["AnthropicConfig"]


@flag_group
class AnthropicConfig(FlagGroup):
    """Anthropic's API."""

    title = "Anthropic"
    server = True

    anthropic_disabled_thinking_effort: str = flag(
        "auto",
        "Reasoning effort of requests with thinking: disabled: none turns thinking off, low is for "
        "models that always think; auto: low if the model's parser says that it always thinks.",
        choices=("auto", "none", "low"),
    )
