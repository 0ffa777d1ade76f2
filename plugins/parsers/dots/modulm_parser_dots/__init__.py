"""Tool calls of rednote dots: elements, or a JSON object, in `<dots_function_call>`.

Source: the chat template of the dots models.
"""

from __future__ import annotations

from attrs import evolve

from modulm.contracts.parser import Example
from modulm_parsing import CallKeys, MessageReader, Steps, XmlCalls, read_call
from modulm_parsing.examples import weather

__all__ = ["DotsToolParser"]

_UNKNOWN_TOOL = '<dots_function_call>{"name": "f", "arguments": {}}</dots_function_call>'


class DotsToolParser(XmlCalls):
    """Calls of tools that the request does not define stay text."""

    name = "dots"
    api = 1
    outer = ("<dots_function_call>", "</dots_function_call>")
    strict_outer = True
    call = ('<invoke name="', '">', "</invoke>")
    parameter = ('<parameter name="', '">', "</parameter>")
    known_only = True
    examples = (
        weather(
            '<dots_function_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n'
            "</invoke>\n</dots_function_call>"
        ),
        weather(
            '<dots_function_call>\n{"name": "get_weather", "arguments": '
            '{"city": "Oslo", "days": 3}}\n</dots_function_call>'
        ),
        evolve(weather(_UNKNOWN_TOOL, content=_UNKNOWN_TOOL), calls=()),
        Example(_UNKNOWN_TOOL, calls=(("f", {}),)),
    )

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        yield from message.source.space()
        if (yield from message.source.peek()) == "{":
            yield from read_call(message, CallKeys())
            yield from message.optional(self.outer[1])
        else:
            yield from super().read(message, opener)
