"""Reasoning effort as variables of the models' chat templates."""

from __future__ import annotations

from typing import Any

from modulm.contracts.parser import ReasoningParser
from modulm.errors import RequestError
from modulm.plugins import manager

__all__ = ["EFFORTS", "thinking_variables", "variables_without_thinking"]

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
    known = _class_of(parser)
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


def variables_without_thinking(parser: str | None) -> dict[str, Any]:
    """Return the chat template variables that turn thinking off. A model that always thinks gets
    its lowest effort.
    """
    variables = thinking_variables(parser, thinks=False)
    if lowest := _class_of(parser).template_efforts.get("none"):
        variables["reasoning_effort"] = lowest
    return variables


def _class_of(parser: str | None) -> type[ReasoningParser]:
    if not parser:
        return ReasoningParser
    loaded: type[ReasoningParser] = manager.current().load("reasoning_parsers", parser)
    return loaded
