"""Tool calls of Swiss AI Apertus: a list of objects with one member, `{name: {arguments}}`.

Source: the chat template of Apertus.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import JsonCalls, MessageReader, NotACall, Steps
from modulm_parsing.examples import weather
from modulm_parsing.json_text import read_json, read_members

__all__ = ["ApertusToolParser"]


class ApertusToolParser(JsonCalls):
    """The member's key is the tool's name."""

    name = "apertus"
    api = 1
    openers = ("<|tools_prefix|>",)
    closers = ("<|tools_suffix|>",)
    examples = (
        weather('<|tools_prefix|>[{"get_weather": {"city": "Oslo", "days": 3}}]<|tools_suffix|>'),
        Example(
            '<|tools_prefix|>[{"f": {}}, {"g": {"x": [{}]}}]<|tools_suffix|>',
            calls=(("f", {}), ("g", {"x": [{}]})),
        ),
        Example("<|tools_prefix|>[{}]<|tools_suffix|>", "<|tools_prefix|>[{}]<|tools_suffix|>"),
    )

    def call(self, message: MessageReader) -> Steps[None]:
        source = message.source
        before = message.calls

        def member(key: str) -> Steps[None]:
            if (yield from source.peek()) != "{":
                raise NotACall
            message.start(key)
            yield from read_json(source, message.raw_arguments)
            message.end_raw()

        yield from read_members(source, member)
        if message.calls == before:
            raise NotACall
