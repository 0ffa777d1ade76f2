"""Tool calls of Microsoft Phi-4-mini: the word `functools` and a JSON list.

Source: the chat template of Phi-4-mini-instruct.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import JsonCalls, MessageReader, Steps
from modulm_parsing.examples import weather

__all__ = ["Phi4MiniJsonToolParser"]


class Phi4MiniJsonToolParser(JsonCalls):
    """Only a list of calls immediately after the word counts."""

    name = "phi4_mini_json"
    api = 1
    openers = ("functools[",)
    examples = (
        weather('functools[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]'),
        Example("Use functools[partial] or functools.", "Use functools[partial] or functools."),
    )

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        yield from self.listed(message)
