"""Xiaomi MiMo: tool calls as XML-like functions; reasoning.

Source: the chat template of MiMo.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import Thoughts, XmlCalls
from modulm_parsing.examples import thought, weather

__all__ = ["MimoReasoningParser", "MimoToolParser"]


class MimoToolParser(XmlCalls):
    """As Qwen Coder, with verbatim values."""

    name = "mimo"
    api = 1
    outer = ("<tool_call>", "</tool_call>")
    call = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    framed = False
    examples = (
        weather(
            "<tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
            "<parameter=days>3</parameter>\n</function>\n</tool_call>"
        ),
        Example(
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
            calls=(("f", {"a": "\nx\n"}),),
        ),
    )


class MimoReasoningParser(Thoughts):
    """On by default. A tool call ends reasoning."""

    name = "mimo"
    api = 1
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    examples = (
        thought("Hm.</think>\n\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
    )
