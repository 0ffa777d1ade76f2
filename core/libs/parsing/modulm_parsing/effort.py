"""Reasoning effort as variables of the models' chat templates."""

from __future__ import annotations

from typing import Any

from modulm.contracts.parser import ReasoningParser
from modulm.errors import RequestError
from modulm.plugins import manager

__all__ = ["EFFORTS", "thinking_variables"]

#: In ascending order.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_variables(
    parser: str | None,
    effort: str | None = None,
    thinks: bool | None = None,
    field: str = "reasoning_effort",
) -> dict[str, Any]:
    """Return the chat template variables for a reasoning effort.

    parser: the reasoning parser's name; without one, the variables most templates use. thinks:
    whether to think at all; derived from the effort by default. Raises RequestError for an unknown
    effort, for `field`.
    """
    if effort is not None and effort not in EFFORTS:
        raise RequestError(f"{field}: one of {', '.join(EFFORTS)}", field)
    known = manager.current().load("reasoning_parsers", parser) if parser else ReasoningParser
    variables: dict[str, Any] = {}
    if thinks is None and effort is not None:
        thinks = effort != "none"
    if thinks is not None:
        for name, values in known.template_switches.items():
            if values[thinks] is not None:
                variables[name] = values[thinks]
    template_effort = None if effort is None else known.template_efforts.get(effort, effort)
    if template_effort:
        variables["reasoning_effort"] = template_effort
    return variables
