"""Tencent Hunyuan-A13B, Hy 3 and Hy 4.

Source: the chat templates of Hunyuan-A13B, Hy 3 and Hy 4. A Hy checkpoint may write its tags with a
suffix, `<tool_calls:ab12>`, which is read from the vocabulary or from the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import (
    JsonCalls,
    MessageReader,
    NotACall,
    PairCalls,
    Source,
    Steps,
    Thoughts,
    markers,
)
from modulm_parsing.examples import thought, weather

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = [
    "HunyuanA13bReasoningParser",
    "HunyuanA13bToolParser",
    "HyV3ReasoningParser",
    "HyV3ToolParser",
    "HyV4ReasoningParser",
    "HyV4ToolParser",
]

_SUFFIXED = re.compile(r"<(?:tool_calls|think)(:[^<>]+)>")
_SUFFIX = re.compile(r"[\w.-]*")


class HunyuanA13bToolParser(JsonCalls):
    """A list in `<tool_calls>`, normally in the `<answer>`; ignored inside reasoning."""

    name = "hunyuan_a13b"
    api = 1
    openers = ("<tool_calls>", "<think>")
    closers = ("</tool_calls>",)
    framing = ("<answer>", "</answer>")
    examples = (
        weather(
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]'
            "</tool_calls>"
        ),
        weather(
            '<answer>\n<tool_calls>[{"name": "get_weather", "arguments": '
            '{"city": "Oslo", "days": 3}}]</tool_calls>\n</answer>'
        ),
        Example(
            '<think>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>\n</think>\nHi',
            '<think>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>\n</think>\nHi',
        ),
    )

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        if opener != "<think>":
            yield from super().read(message, opener)
            return
        message.source.unconfirmed = None
        message.content(opener)
        closing = yield from message.source.until(markers("</think>"), message.content)
        message.content(closing or "")


class HunyuanA13bReasoningParser(Thoughts):
    """The model writes the tags, as ordinary tokens, on lines of their own."""

    name = "hunyuan_a13b"
    api = 1
    framing = ("<answer>", "</answer>")
    prompt_opens = False
    examples = (
        thought("<think>\nHm.\n</think>\n<answer>\nHi\n</answer>"),
        Example("<answer>\nHi\n</answer>", "Hi"),
    )


class HyV4ToolParser(PairCalls):
    """Types come from the tool's schema."""

    name = "hy_v4"
    api = 1
    group = ("<tool_calls>", "</tool_calls>")
    call = ("<tool_call>", "</tool_call>")
    after_name = "<tool_sep>"
    examples = (
        weather(
            "<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
            "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call></tool_calls>"
        ),
        weather(
            "<tool_calls:ab12><tool_call:ab12>get_weather<arg_key:ab12>city</arg_key:ab12>"
            "<arg_value:ab12>Oslo</arg_value:ab12><arg_key:ab12>days</arg_key:ab12>"
            "<arg_value:ab12>3</arg_value:ab12></tool_call:ab12></tool_calls:ab12>"
        ),
        Example("A <tool_calls: list", "A <tool_calls: list"),
    )

    def __init__(self, context: ParseContext) -> None:
        self._suffix = ""
        suffix = _suffix(context.tokenizer)
        self.openers = ("<tool_calls>", "<tool_call>", "<tool_calls:", "<tool_call:")
        if suffix:
            self._take_suffix(suffix)
            self.openers = (self.group[0], self.call[0])
        super().__init__(context)

    def _take_suffix(self, suffix: str) -> None:
        """Add a suffix to all tags."""
        if suffix == self._suffix:
            return
        before, self._suffix = self._suffix, suffix

        def pair(tags: tuple[str, str]) -> tuple[str, str]:
            opening, closing = (f"{tag.removesuffix(f'{before}>').removesuffix('>')}{suffix}>"
                                for tag in tags)  # fmt: skip
            return opening, closing

        self.group, self.call = pair(self.group), pair(self.call)
        self.key, self.value = pair(self.key), pair(self.value)
        self.after_name = f"<tool_sep{suffix}>"

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        if opener.endswith(":"):
            suffix = yield from message.source.run(_SUFFIX)
            if not suffix or not (yield from message.source.expect(markers(">"))):
                raise NotACall
            self._take_suffix(f":{suffix}")
            opener = f"{opener}{suffix}>"
        elif opener.endswith(("calls>", "call>")):
            self._take_suffix("")
        yield from super().read(message, opener)


class HyV3ToolParser(HyV4ToolParser):
    """As Hy 4, with a tag after the name."""

    name = "hy_v3"
    api = 1
    examples = (
        weather(
            "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
            "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
            "</tool_call>\n</tool_calls>"
        ),
    )


class HyV4ReasoningParser(Thoughts):
    """On unless `reasoning_effort` is `no_think`."""

    name = "hy_v4"
    api = 1
    template_switches: ClassVar[Mapping[str, tuple[object, object]]] = {
        "reasoning_effort": ("no_think", "high")
    }
    template_efforts: ClassVar[Mapping[str, str]] = {
        "none": "no_think", "minimal": "low", "medium": "high", "xhigh": "high", "max": "high",
    }  # fmt: skip
    ends = ("<tool_calls>", "<tool_calls:")
    examples = (
        thought("Hm.</think>\n\nHi", reasoning_effort="high"),
        thought("Hm.</think:ab12>\n\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"reasoning_effort": "no_think"})),
    )

    def __init__(self, context: ParseContext) -> None:
        suffix = _suffix(context.tokenizer)
        if suffix:
            self.opening, self.closing = (f"<think{suffix}>",), (f"</think{suffix}>",)
            self.ends = (f"<tool_calls{suffix}>",)
        else:
            self.opening = ("<think>", "<think:")
            self.closing = ("</think>", "</think:")
        self.openers = (*self.opening, *self.closing)
        super().__init__(context)

    def ending(self, message: MessageReader) -> str | None:
        return self.closing[0]

    def thinking_enabled(self) -> bool:
        effort = self.context.template_kwargs.get("reasoning_effort")
        return self.on if effort is None else effort != "no_think"

    def label(self, source: Source) -> Steps[None]:
        if source.unconfirmed and source.unconfirmed[0].endswith(":"):
            yield from source.run(_SUFFIX)
            if not (yield from source.expect(markers(">"))):
                raise NotACall

    def after(self, message: MessageReader, word: str) -> Steps[None]:
        source = message.source
        if word.endswith(":"):
            suffix = yield from source.run(_SUFFIX)
            if not (yield from source.expect(markers(">"))):
                message.content(word + suffix)
                return
        yield from source.space()


class HyV3ReasoningParser(HyV4ReasoningParser):
    """Off unless `reasoning_effort` is set to something other than `no_think`."""

    name = "hy_v3"
    api = 1
    on = False
    examples = (
        thought("Hm.</think>\n\nHi", reasoning_effort="high"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"reasoning_effort": "no_think"})),
        Example("Hi", "Hi"),
    )


def _suffix(tokenizer: Tokenizer | None) -> str:
    """Return the suffix of tag names in the vocabulary."""
    if tokenizer is None:
        return ""
    matches = (_SUFFIXED.fullmatch(token) for token in tokenizer.added_tokens)
    return next((match.group(1) for match in matches if match is not None), "")
