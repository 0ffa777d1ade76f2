"""Zhipu GLM-4.5 to GLM-5: tool calls as a name with key-value pairs; reasoning.

Source: the chat templates of GLM-4.5, GLM-4.7 and GLM-5, with and without line feeds between tags.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import PairCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["Glm45ReasoningParser", "Glm47ReasoningParser", "GlmToolParser"]


class GlmToolParser(PairCalls):
    """Types come from the tool's schema; values are verbatim."""

    name = "glm45"
    api = 1
    call = ("<tool_call>", "</tool_call>")
    examples = (
        weather(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
        weather(
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
            "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        ),
        Example("<tool_call>now</tool_call>", calls=(("now", {}),)),
        Example("The <tool_call> opens a call.", content="The <tool_call> opens a call."),
    )


class Glm45ReasoningParser(Thoughts):
    """The model writes both tags."""

    name = "glm45"
    api = 1
    prompt_opens = False
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    examples = (
        thought("<think>Hm.</think>\nHi"),
        Example("Hi", "Hi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
    )


class Glm47ReasoningParser(Glm45ReasoningParser):
    """The prompt opens reasoning."""

    name = "glm47"
    api = 1
    prompt_opens = True
    examples = (
        thought("Hm.</think>Hi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
        Example("Hi", "Hi", context=ParseContext(prompt_tail="<|assistant|>\n</think>")),
    )
