"""Tool calls in Hermes format: a JSON object between `<tool_call>` tags, one block per call.

Source: the prompt format of Nous Hermes 2 Pro (github.com/NousResearch/Hermes-Function-Calling),
which the Qwen 2.5 and 3 chat templates share. Some checkpoints write `arguments` before `name`,
omit the closing tag, or put several objects into one block; all of these are accepted.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import JsonCalls
from modulm_parsing.examples import weather

__all__ = ["HermesToolParser"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(JsonCalls):
    """An opening tag that no call follows is text."""

    name = "hermes"
    api = 1
    openers = (OPEN,)
    closers = (CLOSE,)
    examples = (
        weather(
            f'{OPEN}\n{{"name": "get_weather", "arguments": {{"city": "Oslo", "days": 3}}}}\n'
            f"{CLOSE}"
        ),
        Example(
            f'Both:\n{OPEN}\n{{"arguments": {{"a": "}}{{"}}, "name": "f"}}\n{CLOSE}\n'
            f'{OPEN}{{"name": "g"}}',
            content="Both:",
            calls=(("f", {"a": "}{"}), ("g", {})),
        ),
        Example(
            f"A `{OPEN}` tag opens a call; so does {OPEN} alone.",
            content=f"A `{OPEN}` tag opens a call; so does {OPEN} alone.",
        ),
    )
