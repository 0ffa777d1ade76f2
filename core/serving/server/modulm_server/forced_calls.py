"""Tool calls that a grammar guarantees, in the model's own format if its parser describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.parser import ParseContext
from modulm.contracts.sampling import StructuredOutputs
from modulm.plugins import manager
from modulm_server.constraints import forced_tool, single_constraint

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_server.chat_turn import Parsers

__all__ = ["ForcedCalls", "force_calls"]


@frozen
class ForcedCalls:
    """The grammar that guarantees tool calls.

    constraint: the grammar; None if no call is guaranteed. in_model_format: whether it describes
    the model's own call format. calls_only_format: the format of calls without text before them,
    if text is allowed too.
    """

    constraint: StructuredOutputs | None = None
    in_model_format: bool = False
    calls_only_format: Mapping[str, Any] | None = None

    def combine(self, **formats: StructuredOutputs | None) -> tuple[str, StructuredOutputs] | None:
        """Combine the calls with the request's other constraints into (field, constraint) or None.

        If the model decides whether to call, its answer may be constrained to JSON too. Raises
        ApiError(400) for constraints that exclude each other.
        """
        only = single_constraint(**formats)
        if only is None or self.constraint is None or self.calls_only_format is None:
            return single_constraint(tools=self.constraint, **formats)
        name, constraint = only
        if constraint.json is None and not constraint.json_object:
            return single_constraint(tools=self.constraint, **formats)
        schema = (
            json.loads(constraint.json) if isinstance(constraint.json, str) else constraint.json
        )
        text = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
        return name, _tag({"type": "or", "elements": [text, self.calls_only_format]})


def force_calls(
    choice: str | Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    parsers: Parsers,
    tokenizer: Tokenizer | None,
    *,
    parallel: bool = True,
    restricted: bool = False,
) -> ForcedCalls:
    """Build the grammar for a request's `tool_choice`.

    "required" and a named tool guarantee a call. With "auto", calls follow their schemas if a
    tool is strict or `--tool-strict-level` says so, and are limited to `tools` if the prompt lists
    more (`restricted`). If no parser describes the model's format, forced calls are plain JSON.
    parallel: allow several calls. Raises ApiError(400) or RequestError.
    """
    forced = forced_tool(choice, tools, parallel)
    marked = restricted or any(tool["function"].get("strict") is True for tool in tools)
    strict = marked or parsers.strict_level != "auto"
    if choice == "auto" and parsers.strict_level == "function" and not marked:
        tools = [_with_any_arguments(tool) for tool in tools]
    name = parsers.tool
    if not name or not tools or (forced is None and not (choice == "auto" and strict)):
        return ForcedCalls(forced)

    def form(choice: str | Mapping[str, Any]) -> Mapping[str, Any] | None:
        context = ParseContext(
            tools=tools,
            tool_choice=choice,
            tokenizer=tokenizer,
            max_calls=None if parallel else 1,
            grammar_enforced=True,
        )
        tag = manager.current().load("tool_parsers", name)(context).structural_tag()
        return None if tag is None else tag["format"]

    tag_format = form(choice)
    if tag_format is None:
        return ForcedCalls(forced)
    return ForcedCalls(
        _tag(tag_format),
        in_model_format=True,
        calls_only_format=form("required") if choice == "auto" else None,
    )


def _with_any_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with a schema that allows any object, so that only its name is constrained."""
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


def _tag(form: Mapping[str, Any]) -> StructuredOutputs:
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return StructuredOutputs(structural_tag=text)
