"""Beam: messages with a recipient and a channel; the parameters of tool calls are elements.

Source: the response template of the Beam checkpoints; a prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import ArgumentsWriter, Ended, MessageReader, NotACall, Steps, markers
from modulm_parsing.channels import ChannelReader, ChannelReasoning, ChannelTools, Header
from modulm_parsing.elements import Element
from modulm_parsing.examples import thought, weather
from modulm_parsing.strict import Function, tagged_call

__all__ = ["BeamReasoningParser", "BeamToolParser"]

OPEN, CLOSE = '<rfl:parameter name="', "</rfl:parameter>"
_CALL = (
    " to=get_weather<|channel|>analysis <|constrain|>xml<|message|>"
    '<rfl:parameter name="city">\nOslo\n</rfl:parameter>\n'
    '<rfl:parameter name="days">\n3\n</rfl:parameter>'
)


class BeamReader(ChannelReader):
    """A message to a tool is a call, whatever its channel."""

    @staticmethod
    def is_thought(header: Header) -> bool:
        return header.channel == "analysis" and header.recipient is None

    @staticmethod
    def called(header: Header) -> str | None:
        return header.recipient or None


class BeamToolParser(ChannelTools):
    """One line feed on each side of a value is layout. Its closing tag may be missing."""

    name = "beam"
    api = 1
    reader = BeamReader
    examples = (
        weather(f"{_CALL}<|call|>"),
        weather(
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{_CALL}<|end|>"
            f"<|start|>assistant{_CALL}<|call|>",
            count=2,
            reasoning="Hm.",
        ),
        weather(_CALL.replace("\n</rfl:parameter>\n<", "\n<") + "<|call|>"),
        Example(
            " to=now<|channel|>analysis <|constrain|>xml<|message|><|call|>", calls=(("now", {}),)
        ),
    )

    def strict_openers(self) -> tuple[str, ...]:
        return ("to=",)

    def strict_call(self, call: str, function: Function) -> Element:
        return tagged_call(call, function, OPEN, CLOSE, (CLOSE, f"\n{OPEN}", *self.reader.ends))

    def message(self, message: MessageReader, name: str) -> Steps[None]:
        source = message.source
        ends = markers(*self.reader.ends)
        if not (yield from source.over()):
            opening = yield from source.comes(markers(OPEN, *self.reader.ends))
            if opening is None:
                raise NotACall
        arguments = ArgumentsWriter(message.arguments, message.start(name))
        while not (yield from source.over()):
            if (yield from source.comes(ends)):
                break
            if not (yield from source.expect(markers(OPEN))):
                return
            key, _ = yield from source.through(markers('">'))
            writer = arguments.value(key, framed=True)
            word = yield from source.until(markers(CLOSE, f"\n{OPEN}"), writer.feed)
            if word is None:
                raise Ended
            writer.end()
            if word != CLOSE:
                source.back(len(OPEN))
            yield from source.space()
        arguments.end()
        message.end()


class BeamReasoningParser(ChannelReasoning):
    """Reasoning is the analysis channel."""

    name = "beam"
    api = 1
    reader = BeamReader
    examples = (
        thought(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Hi<|return|>"
        ),
    )
