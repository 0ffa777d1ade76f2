"""AI2 Olmo 3: tool calls as Python, one per line; reasoning.

Source: the chat templates of Olmo 3 Instruct and Olmo 3 Think.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import PythonCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["Olmo3ReasoningParser", "Olmo3ToolParser"]


class Olmo3ToolParser(PythonCalls):
    """Literals may also be written as in JSON."""

    name = "olmo3"
    api = 1
    openers = ("<function_calls>",)
    closers = ("</function_calls>",)
    examples = (
        weather('<function_calls>get_weather(city="Oslo", days=3)</function_calls>'),
        Example(
            "<function_calls>\nf(a=true, b=null)\ng(c={'d': [False]})\n</function_calls>",
            calls=(("f", {"a": True, "b": None}), ("g", {"c": {"d": [False]}})),
        ),
    )


class Olmo3ReasoningParser(Thoughts):
    """The tags are ordinary tokens; the opening tag is often in the prompt."""

    name = "olmo3"
    api = 1
    examples = (thought("Hm.</think>\n\nHi"), thought("<think>Hm.</think>\n\nHi"))
