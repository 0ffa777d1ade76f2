"""DeepSeek: tool calls as JSON after a header (V3, V3.1) or as DSML elements (V3.2 and later);
reasoning.

Source: the chat templates of DeepSeek V3-0324, R1-0528 and V3.1, and the message encodings of V3.2
and V4. Models distilled from R1, and Holo2, use the same reasoning format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import HeadedCalls, MessageReader, Source, Steps, Thoughts, XmlCalls, markers
from modulm_parsing.examples import thought, weather
from modulm_parsing.typed import EVERY, STRING

__all__ = [
    "DeepseekR1ReasoningParser",
    "DeepseekV3ReasoningParser",
    "DeepseekV3ToolParser",
    "DeepseekV4ReasoningParser",
    "DeepseekV4ToolParser",
    "DeepseekV31ToolParser",
    "DeepseekV32ToolParser",
    "DeepseekV41ReasoningParser",
    "DeepseekV41ToolParser",
    "Holo2ReasoningParser",
]

_ARGUMENTS = '{"city": "Oslo", "days": 3}'


class DeepseekV31ToolParser(HeadedCalls):
    """Name, separator, arguments."""

    name = "deepseek_v31"
    api = 1
    group = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    open = "<｜tool▁call▁begin｜>"
    separators = ("<｜tool▁sep｜>",)
    close = "<｜tool▁call▁end｜>"
    examples = (
        weather(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            f"{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        Example(
            "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            content="Both.",
            calls=(("f", {}), ("g", {})),
        ),
    )


class DeepseekV3ToolParser(HeadedCalls):
    """Type, separator, name, and the arguments in a fenced block."""

    name = "deepseek_v3"
    api = 1
    group = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    open = "<｜tool▁call▁begin｜>"
    separators = ("<｜tool▁sep｜>",)
    close = "<｜tool▁call▁end｜>"
    fences = ("```json", "```")
    examples = (
        weather(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            f"```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        weather(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            f"{_ARGUMENTS}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            f"get_weather\n```json\n{_ARGUMENTS}",
            count=2,
        ),
    )

    def header(self, message: MessageReader) -> Steps[tuple[str, str | None]]:
        yield from message.source.through(markers(*self.separators))
        name, _ = yield from message.source.through(markers("\n"))
        return name.strip(), None


class DeepseekV32ToolParser(XmlCalls):
    """DSML: parameters with `string="true"` are text, others are JSON."""

    name = "deepseek_v32"
    api = 1
    outer = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call = ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>")
    parameter = ('<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>")
    framed = False
    examples = (
        weather(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        ),
        Example(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="a" string="true">3</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="false">{"c": null}</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            calls=(("f", {"a": "3", "b": {"c": None}}), ("g", {})),
        ),
    )

    def allowed(self, source: Source) -> Steps[frozenset[str] | None]:
        attributes, _ = yield from source.through(markers(">"))
        if 'string="true"' in attributes:
            return STRING
        return EVERY if 'string="false"' in attributes else None


class DeepseekV4ToolParser(DeepseekV32ToolParser):
    """DSML in another outer element."""

    name = "deepseek_v4"
    api = 1
    outer = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    examples = (
        weather(
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
        ),
    )


class DeepseekV41ToolParser(DeepseekV32ToolParser):
    """DSML with a space after the marker."""

    name = "deepseek_v41"
    api = 1
    outer = ("<｜DSML｜ calls>", "</｜DSML｜ calls>")
    call = ('<｜DSML｜ invoke name="', '">', "</｜DSML｜ invoke>")
    parameter = ('<｜DSML｜ parameter name="', '"', "</｜DSML｜ parameter>")
    examples = (
        weather(
            '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
            '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
            '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
            "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
        ),
    )


class DeepseekR1ReasoningParser(Thoughts):
    """The prompt opens reasoning."""

    name = "deepseek_r1"
    api = 1
    examples = (
        thought("Hm.</think>\n\nHi"),
        thought("<think>\nHm.\n</think>\n\nHi"),
        Example("Hm.", reasoning="Hm."),
        Example(
            "Hm.</think>Hi",
            "Hi",
            "Hm.",
            context=ParseContext(prompt_tail="<｜Assistant｜><think>\n"),
        ),
        Example("Hi", "Hi", context=ParseContext(prompt_tail="<｜Assistant｜>")),
    )


class DeepseekV3ReasoningParser(Thoughts):
    """Reasoning is off unless the request enables it."""

    name = "deepseek_v3"
    api = 1
    switches = ("thinking", "enable_thinking")
    on = False
    examples = (
        thought("Hm.</think>\n\nHi", thinking=True),
        thought("Hm.</think>\n\nHi", enable_thinking=True),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"thinking": False})),
        Example("Hi", "Hi"),
    )


class Holo2ReasoningParser(DeepseekV3ReasoningParser):
    """As DeepSeek V3, but on by default."""

    name = "holo2"
    api = 1
    on = True
    examples = (
        thought("Hm.</think>\n\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"thinking": False})),
    )


class DeepseekV4ReasoningParser(DeepseekV3ReasoningParser):
    """On by default. Tool calls end reasoning."""

    name = "deepseek_v4"
    api = 1
    template_efforts: ClassVar[Mapping[str, str]] = {
        "none": "", "minimal": "high", "low": "high", "medium": "high", "xhigh": "max",
    }  # fmt: skip
    on = True
    ends = (DeepseekV4ToolParser.outer[0],)
    examples = (
        thought("Hm.</think>\n\nHi", thinking=True),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"thinking": False})),
    )


class DeepseekV41ReasoningParser(DeepseekV4ReasoningParser):
    """As V4."""

    name = "deepseek_v41"
    api = 1
    ends = (DeepseekV41ToolParser.outer[0],)
    examples = (
        thought("Hm.</think>\n\nHi", thinking=True),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"thinking": False})),
    )
