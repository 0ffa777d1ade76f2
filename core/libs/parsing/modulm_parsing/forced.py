"""Forced calls for models without a known format: the text is plain JSON.

With a named tool the text is the arguments object; with `tool_choice="required"` it is an array of
`{"name": ..., "parameters": {...}}` objects, as in vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm_parsing.json_calls import JsonCalls
from modulm_parsing.json_text import read_json
from modulm_parsing.reading import MessageReader, ToolFormat

if TYPE_CHECKING:
    from modulm.contracts.parser import ParseContext
    from modulm_parsing.source import Steps

__all__ = ["NamedCall", "RequiredCalls"]


class NamedCall(ToolFormat):
    """The whole text is the arguments of the tool that the request named."""

    name = "named"
    api = 1

    def __init__(self, context: ParseContext, tool: str) -> None:
        super().__init__(context)
        self._tool = tool

    def begin(self, message: MessageReader) -> Steps[None]:
        source = message.source
        yield from source.space()
        yield from source.peek()
        message.start(self._tool)
        if (yield from source.peek()) == "{":
            yield from read_json(source, message.raw_arguments)
            message.end_raw()

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """No marker opens a region."""
        yield from ()


class RequiredCalls(JsonCalls):
    """The whole text is a JSON array of calls."""

    name = "required"
    api = 1
    argument_keys = ("parameters", "arguments")
    bare = "[{"
