"""What a request says of thinking, as the variables of the models' chat templates."""

from __future__ import annotations

from typing import Any

from modulm.contracts.parser import ReasoningParser
from modulm.errors import RequestError
from modulm.plugins import manager

__all__ = ["EFFORTS", "thinking_variables"]

#: From no thinking at all to as much as there can be.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_variables(
    parser: str | None,
    effort: str | None = None,
    thinks: bool | None = None,
    field: str = "reasoning_effort",
) -> dict[str, Any]:
    """What the templates of a reasoning parser's models are handed for an effort.

    parser: its name; without one, what most templates know. thinks: whether to think at all,
    where that is said; by default by the effort, if there is one. Raises RequestError for an
    unknown effort, blaming `field`.
    """
    if effort is not None and effort not in EFFORTS:
        raise RequestError(f"{field}: one of {', '.join(EFFORTS)}", field)
    known = manager.current().load("reasoning_parsers", parser) if parser else ReasoningParser
    found: dict[str, Any] = {}
    if thinks is None and effort is not None:
        thinks = effort != "none"
    if thinks is not None:
        for name, values in known.template_switches.items():
            if values[thinks] is not None:
                found[name] = values[thinks]
    called = None if effort is None else known.template_efforts.get(effort, effort)
    if called:
        found["reasoning_effort"] = called
    return found
