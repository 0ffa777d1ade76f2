"""The flags of thinking budgets."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ReasoningConfig"]


@flag_group
class ReasoningConfig(FlagGroup):
    """Strings that open and end reasoning, for requests with a thinking budget."""

    title = "ReasoningConfig"
    table = "reasoning_config"

    reasoning_start_str: str = flag(
        "",
        "String that opens reasoning; required without a reasoning parser.",
        key="reasoning_start_str",
        nested=True,
    )
    reasoning_end_str: str = flag(
        "",
        "String that is generated when the budget is used up; by default the end string of the "
        "reasoning parser. It may have a closing sentence before that.",
        key="reasoning_end_str",
        nested=True,
    )
