"""Muse Spark and Muse Glimmer: messages with a recipient; those to tools hold ATEM elements.

Source: the chat template of Muse Glimmer; a prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from modulm.contracts.parser import Example
from modulm_parsing import MessageReader, NotACall, Steps, XmlCalls, markers
from modulm_parsing.channels import (
    START,
    ChannelReader,
    ChannelReasoning,
    ChannelTools,
    Header,
)
from modulm_parsing.elements import Element, const, either, free_text, repeat, sequence
from modulm_parsing.examples import thought, weather
from modulm_parsing.strict import MAX_CALLS, Function, as_tag, tagged_call

__all__ = [
    "MuseGlimmerReasoningParser",
    "MuseGlimmerToolParser",
    "MuseReasoningParser",
    "MuseToolParser",
]

_CALL = (
    ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Oslo</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eom|>"
)


#: Recipients of messages that are not calls.
_SHOWN = ("self", "user", "commentary")


class GlimmerReader(ChannelReader):
    """`self` is reasoning, `user` and `commentary` are content, any other recipient is a tool."""

    ends = ("<|eom|>", "<|eot|>")
    answer = " to=user<|message|>"
    inner = (START, "<|message|>", "to=")

    @staticmethod
    def is_thought(header: Header) -> bool:
        return header.recipient == "self"

    @staticmethod
    def called(header: Header) -> str | None:
        recipients = (None, "self", "user", "commentary", "developer")
        return None if header.recipient in recipients else header.recipient

    @staticmethod
    def is_dropped(header: Header) -> bool:
        return header.recipient == "developer"


class MuseReader(GlimmerReader):
    """A message without a recipient is reasoning."""

    @staticmethod
    def is_thought(header: Header) -> bool:
        return header.recipient in (None, "self")


class _Atem(XmlCalls):
    """The elements of tool calls."""

    name = "atem"
    api = 1
    outer = ("<atem:function_calls>", "</atem:function_calls>")
    call = ('<atem:invoke name="', '">', "</atem:invoke>")
    parameter = ('<atem:parameter name="', '">', "</atem:parameter>")
    framed = False


class MuseGlimmerToolParser(ChannelTools):
    """Only messages to a tool hold calls."""

    name = "muse_glimmer"
    api = 1
    reader: type[ChannelReader] = GlimmerReader
    examples = (
        weather(_CALL),
        weather(
            f" to=self<|message|>Hm.<|eom|><|start|>assistant{_CALL}<|start|>assistant"
            " to=user<|message|>Wait.<|eot|>",
            "Wait.",
            reasoning="Hm.",
        ),
        Example(
            ' to=user<|message|><atem:invoke name="f"></atem:invoke><|eot|>',
            '<atem:invoke name="f"></atem:invoke>',
        ),
    )

    def structural_tag(self) -> Mapping[str, object] | None:
        """With tool choice `auto`, calls may follow visible messages; free text must not begin with
        a recipient.
        """
        if self.context.tool_choice != "auto":
            return super().structural_tag()
        forced = type(self)(evolve(self.context, tool_choice="required")).structural_tag()
        if forced is None:
            return None
        calls: Any = forced["format"]
        end = self.reader.ends[0]
        visible = [const(f" to={whom}<|message|>") for whom in _SHOWN]
        message = sequence(either(*visible), free_text("to=", end))
        before = repeat(sequence(message, const(f"{end}{START}assistant")), 0, MAX_CALLS)
        return as_tag(either(free_text("to=", end), sequence(before, either(calls, message))))

    def strict_call(self, call: str, function: Function) -> Element:
        begin, _, end = _Atem.parameter
        outer = (_Atem.outer or ())[1:]
        return tagged_call(call, function, begin, end, (end, _Atem.call[2], *outer))

    def message(self, message: MessageReader, name: str) -> Steps[None]:
        elements = _Atem(self.context)
        word = yield from message.source.expect(markers(*elements.openers))
        if word is None:
            raise NotACall
        yield from elements.read(message, word)


class MuseToolParser(MuseGlimmerToolParser):
    """As Muse Glimmer; a message without a recipient is reasoning."""

    name = "muse"
    api = 1
    reader = MuseReader
    examples = (
        weather(_CALL),
        weather(f"<|message|>Hm.{_CALL}", reasoning="Hm."),
        Example(" to=commentary<|message|>Hi<|eom|>", "Hi"),
    )


class MuseGlimmerReasoningParser(ChannelReasoning):
    """Reasoning is in messages to `self`."""

    name = "muse_glimmer"
    api = 1
    reader: type[ChannelReader] = GlimmerReader
    examples = (
        thought(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>"),
        Example("<|message|>Hi<|eot|>", "Hi"),
        Example("Hi", "Hi"),
    )


class MuseReasoningParser(MuseGlimmerReasoningParser):
    """Reasoning is in messages to `self` and in those without a recipient."""

    name = "muse"
    api = 1
    reader = MuseReader
    examples = (
        thought("<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>"),
        thought(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>"),
    )
