"""Calls that a grammar guarantees: in the model's own format where its parser can tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.parser import ParseContext
from modulm.contracts.sampling import StructuredOutputs
from modulm.plugins import manager
from modulm_server.constraints import forced_tool, only_one

if TYPE_CHECKING:
    from modulm.text.tokenizer import Tokenizer
    from modulm_server.chat_turn import Parsers

__all__ = ["HeldCalls", "hold_calls"]


@frozen
class HeldCalls:
    """What holds an answer to calls.

    constraint: the grammar; None where nothing is guaranteed. own: whether it is in the model's own
    format. alone: the format of calls with no text before them, where text is allowed.
    """

    constraint: StructuredOutputs | None = None
    own: bool = False
    alone: Mapping[str, Any] | None = None

    def beside(self, **formats: StructuredOutputs | None) -> tuple[str, StructuredOutputs] | None:
        """The one constraint of a request, with the field it comes from.

        Where the model decides whether to call, an answer in JSON may be asked for, too. Raises
        ApiError(400) for constraints that exclude each other.
        """
        answer = only_one(**formats)
        if answer is None or self.constraint is None or self.alone is None:
            return only_one(tools=self.constraint, **formats)
        name, given = answer
        if given.json is None and not given.json_object:
            return only_one(tools=self.constraint, **formats)
        schema = json.loads(given.json) if isinstance(given.json, str) else given.json
        text = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
        return name, _tag({"type": "or", "elements": [text, self.alone]})


def hold_calls(
    choice: str | Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    parsers: Parsers,
    tokenizer: Tokenizer | None,
    *,
    several: bool = True,
    fewer: bool = False,
) -> HeldCalls:
    """What makes the model call as the request wants it.

    tools: those that may be called; fewer: they are not all that the model reads of. A call is
    guaranteed for "required" and for a named tool; with "auto", calls are held to their schemas
    where a tool is strict, and to the allowed tools where those are fewer. Without a parser that
    can tell the model's format, forced calls are plain JSON. Raises ApiError(400) or RequestError.
    """
    forced = forced_tool(choice, tools, several)
    strict = fewer or any(tool["function"].get("strict") is True for tool in tools)
    name = parsers.tool
    if not name or not tools or (forced is None and not (choice == "auto" and strict)):
        return HeldCalls(forced)

    def form(wanted: str | Mapping[str, Any]) -> Mapping[str, Any] | None:
        context = ParseContext(
            tools=tools,
            tool_choice=wanted,
            tokenizer=tokenizer,
            max_calls=None if several else 1,
            held=True,
        )
        tag = manager.current().load("tool_parsers", name)(context).structural_tag()
        return None if tag is None else tag["format"]

    found = form(choice)
    if found is None:
        return HeldCalls(forced)
    return HeldCalls(_tag(found), own=True, alone=form("required") if choice == "auto" else None)


def _tag(form: Mapping[str, Any]) -> StructuredOutputs:
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return StructuredOutputs(structural_tag=text)
