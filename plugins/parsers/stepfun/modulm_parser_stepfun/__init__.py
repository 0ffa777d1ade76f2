"""StepFun Step-3, Step-3.5, Step-3.7 and Step-5: tool calls as elements; reasoning.

Source: the chat templates of Step-3, Step-3.5 and Step-5.
"""

from __future__ import annotations

from modulm_parsing import MessageReader, Source, Steps, Thoughts, XmlCalls, markers
from modulm_parsing.examples import thought, weather

__all__ = [
    "Step3ReasoningParser",
    "Step3ToolParser",
    "Step3p5ReasoningParser",
    "Step3p5ToolParser",
    "Step5ReasoningParser",
    "Step5ToolParser",
]

_CALL = "<｜tool_call_begin｜>"
_QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


class Step3ToolParser(XmlCalls):
    """Type, separator and an element, between special tokens."""

    name = "step3"
    api = 1
    outer = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
    call = ('<steptml:invoke name="', '">', "</steptml:invoke>")
    parameter = ('<steptml:parameter name="', '">', "</steptml:parameter>")
    framed = False
    examples = (
        weather(
            "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="get_weather"><steptml:parameter name="city">Oslo'
            '</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
            "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
        ),
        weather(
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="f">'
            "</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="g"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>Hi',
            "Hi",
            calls=(("f", {}), ("g", {})),
        ),
    )

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.outer, _CALL, "<｜tool_call_end｜>", "<｜tool_sep｜>")

    def lead(self, source: Source, opener: str) -> Steps[None]:
        for word in (_CALL, "function", "<｜tool_sep｜>"):
            yield from source.space()
            yield from source.expect(markers(word))

    def between(self, message: MessageReader) -> Steps[bool]:
        source = message.source
        if (yield from message.optional("<｜tool_call_end｜>")) is None:
            return (yield from super().between(message))
        if (yield from message.optional(_CALL, self.outer[1])) != _CALL:
            return True
        source.unconfirmed = [_CALL]
        yield from self.lead(source, _CALL)
        yield from source.space()
        return (yield from source.expect(markers(self.call[0]))) is None


class Step3p5ToolParser(XmlCalls):
    """As Qwen Coder."""

    name = "step3p5"
    api = 1
    outer = ("<tool_call>", "</tool_call>")
    call = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    examples = (weather(_QWEN),)


class Step5ToolParser(Step3p5ToolParser):
    """White space around the calls is content; null is written `None`."""

    name = "step5"
    api = 1
    keeps_space = True
    examples = (weather(_QWEN), weather(f"Both.\n\n{_QWEN}{_QWEN}", "Both.\n\n", 2))


class Step3ReasoningParser(Thoughts):
    """Everything before the closing tag."""

    name = "step3"
    api = 1
    ends = ("<｜tool_calls_begin｜>",)
    examples = (thought("Hm.</think>\n\nHi"),)


class Step3p5ReasoningParser(Thoughts):
    """The template always opens reasoning; a tool call ends it, too."""

    name = "step3p5"
    api = 1
    ends = ("<tool_call>",)
    examples = (thought("Hm.\n</think>\nHi"),)


class Step5ReasoningParser(Thoughts):
    """The prompt opens reasoning."""

    name = "step5"
    api = 1
    ends = ("<tool_call>",)
    examples = (thought("Hm.</think>\n\nHi"),)
