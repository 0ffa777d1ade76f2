"""Poolside Laguna: tool calls as a name with key-value pairs; reasoning.

Source: the chat template of Laguna.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import PairCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["PoolsideReasoningParser", "PoolsideToolParser"]


class PoolsideToolParser(PairCalls):
    """Types come from the tool's schema."""

    name = "poolside_v1"
    api = 1
    call = ("<tool_call>", "</tool_call>")
    examples = (
        weather(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
    )


class PoolsideReasoningParser(Thoughts):
    """Off unless the request enables it; markers in earlier turns are ignored."""

    name = "poolside_v1"
    api = 1
    switches = ("enable_thinking", "thinking")
    on = False
    turn = "<assistant>"
    examples = (
        thought("Hm.</think>\n\nHi", enable_thinking=True),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
        Example(
            "Hi", "Hi", context=ParseContext(prompt_tail="<user>Say <think></user>\n<assistant>\n")
        ),
        Example(
            "m.</think>Hi", "Hi", "m.", context=ParseContext(prompt_tail="<assistant>\n<think>H")
        ),
    )
