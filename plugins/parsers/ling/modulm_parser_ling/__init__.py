"""inclusionAI Ling 3: tool calls as a name with key-value pairs; reasoning.

Source: the chat template of Ling 3, which follows that of GLM.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import PairCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["Ling3ReasoningParser", "Ling3ToolParser"]


class Ling3ToolParser(PairCalls):
    """Types come from the tool's schema."""

    name = "ling3"
    api = 1
    call = ("<tool_call>", "</tool_call>")
    examples = (
        weather(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
    )


class Ling3ReasoningParser(Thoughts):
    """On by default."""

    name = "ling3"
    api = 1
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    examples = (
        thought("Hm.</think>\n\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
    )
