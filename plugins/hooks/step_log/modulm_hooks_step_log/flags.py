"""The flag of the log of steps."""

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["StepLogConfig"]


@flag_group
class StepLogConfig(FlagGroup):
    """What the engine does, step by step."""

    title = "Log of steps"

    enable_logging_iteration_details: bool = flag(
        False, "Log each step: its tokens, requests, drafts and time. For debugging."
    )
