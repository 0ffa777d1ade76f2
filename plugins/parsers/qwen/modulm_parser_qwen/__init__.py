"""Qwen: reasoning between `<think>` tags, tool calls as XML-like functions and parameters.

Source: the chat templates of the Qwen 3 checkpoints. Some open reasoning in the prompt, others
leave it to the model; `enable_thinking=False` adds an empty, closed block to the prompt. The call
format is that of Qwen3-Coder, Qwen3-Next and Qwen 3.5; MiniCPM-V, Nemotron 3 and Granite 4.2 share
it.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import Thoughts, XmlCalls
from modulm_parsing.examples import weather

__all__ = ["Qwen3CoderToolParser", "Qwen3ReasoningParser"]


class Qwen3CoderToolParser(XmlCalls):
    """One line feed on each side of a value is layout; types come from the tool's schema."""

    name = "qwen3_coder"
    api = 1
    outer = ("<tool_call>", "</tool_call>")
    call = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    examples = (
        weather(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        ),
        Example("<tool_call>\n<function=now>\n</function>\n</tool_call>", calls=(("now", {}),)),
        weather(
            "<function=get_weather><parameter=city>Oslo\n<parameter=days>3</function>",
        ),
        Example(
            "<tool_call>\n<function=f>\n<parameter=x>\n\na</parameter>b\n\n</parameter>\n"
            "</function>\n</tool_call>",
            calls=(("f", {"x": "\na</parameter>b\n"}),),
        ),
        Example("Write <function=name> first.", content="Write <function=name> first."),
    )


class Qwen3ReasoningParser(Thoughts):
    """On unless `enable_thinking` is false. A tool call ends reasoning as its closing tag does."""

    name = "qwen3"
    api = 1
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    examples = (
        Example("<think>\nHm.\n</think>\n\nHi", content="Hi", reasoning="Hm."),
        Example("Hm.\n</think>\n\nHi", content="Hi", reasoning="Hm."),
        Example(
            "The `</think>` tag ends this.</think>Hi",
            content="Hi",
            reasoning="The `</think>` tag ends this.",
        ),
        Example("Hi", content="Hi", context=ParseContext(prompt_tail="<|im_start|>assistant\n")),
        Example("Hi", content="Hi", context=ParseContext(prompt_tail="<think>\n\n</think>\n\n")),
        Example("Hm.", reasoning="Hm.", context=ParseContext(prompt_tail="<think>\n")),
    )
