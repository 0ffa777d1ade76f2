"""The flag of routed experts, by vLLM's name."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ExpertRoutesConfig"]


@flag_group
class ExpertRoutesConfig(FlagGroup):
    """Routed experts in answers, and from requests."""

    title = "ExpertRoutesConfig"

    enable_return_routed_experts: bool = flag(
        False,
        "Return the experts that the routers chose for each token (`routed_experts` of answers), "
        "and use those that a request hands back (router replay). For mixtures of experts.",
    )
