"""OpenAI gpt-oss: Harmony, messages with a channel, a recipient and a content type.

Source: the Harmony response format (github.com/openai/harmony). The token that ends a turn, such as
`<|call|>`, is often missing from the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import MessageReader, NotACall, Steps, markers
from modulm_parsing.channels import ChannelReader, ChannelReasoning, ChannelTools, Header
from modulm_parsing.examples import thought, weather
from modulm_parsing.json_text import read_json

__all__ = ["OpenaiGptossReasoningParser", "OpenaiToolParser"]

_CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 3}'
)


class HarmonyReader(ChannelReader):
    """The analysis channel is reasoning, messages to a tool are calls, the rest is content."""

    @staticmethod
    def is_thought(header: Header) -> bool:
        return header.channel == "analysis" and HarmonyReader.called(header) is None

    @staticmethod
    def called(header: Header) -> str | None:
        whom = header.recipient
        return whom.removeprefix("functions.") if whom not in (None, "", "user") else None


class OpenaiToolParser(ChannelTools):
    """Arguments are JSON; an empty body means no arguments."""

    name = "openai"
    api = 1
    reader = HarmonyReader
    examples = (
        weather(f"{_CALL}<|call|>"),
        weather(
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{_CALL}<|call|>",
            reasoning="Hm.",
        ),
        weather(
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
            " to=functions.get_weather<|channel|>commentary json<|message|>"
            '{"city": "Oslo", "days": 3}',
            "Let me see.",
        ),
        Example("<|channel|>commentary to=functions.now<|message|><|call|>", calls=(("now", {}),)),
    )

    def strict_openers(self) -> tuple[str, ...]:
        return ("to=functions.",)

    def message(self, message: MessageReader, name: str) -> Steps[None]:
        source = message.source
        if (yield from source.over()):
            message.start(name)
            return
        if (yield from source.peek()) == "{":
            message.start(name)
            yield from read_json(source, message.raw_arguments)
        elif (yield from source.comes(markers(*self.reader.ends))) is None:
            raise NotACall
        else:
            message.start(name)
        message.end_raw()


class OpenaiGptossReasoningParser(ChannelReasoning):
    """Reasoning is the analysis channel."""

    name = "openai_gptoss"
    api = 1
    template_efforts: ClassVar[Mapping[str, str]] = {
        "none": "low", "minimal": "low", "xhigh": "high", "max": "high",
    }  # fmt: skip
    reader = HarmonyReader
    examples = (
        thought(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Hi<|return|>"
        ),
        Example(
            "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "Hi",
            "Hm.",
            context=ParseContext(prompt_tail="<|start|>assistant<|channel|>analysis<|message|>"),
        ),
        Example("Hi", "Hi"),
    )
