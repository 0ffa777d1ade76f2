"""Mistral: `[TOOL_CALLS]` with a list, or with names and arguments; reasoning in `[THINK]`.

Source: the tokenizers of mistral-common, in three generations: a list of objects before v11, then
`name{arguments}`, then `name[ARGS]{arguments}`. All are accepted.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping
from typing import ClassVar

from modulm.contracts.parser import Example
from modulm_parsing import JsonCalls, MessageReader, NotACall, Steps, Thoughts, markers
from modulm_parsing.examples import thought, weather
from modulm_parsing.json_text import read_json
from modulm_parsing.strict import Layout

__all__ = ["MistralReasoningParser", "MistralToolParser"]

_ARGUMENTS = '{"city": "Oslo", "days": 3}'
_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.\-:/]*")
_IDENTITY = re.compile(r"[A-Za-z0-9]*")


class MistralToolParser(JsonCalls):
    """The marker may precede each of several calls, or only the first."""

    name = "mistral"
    api = 1
    openers = ("[TOOL_CALLS]",)
    examples = (
        weather(f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}"),
        weather(f"[TOOL_CALLS]get_weather{_ARGUMENTS}"),
        weather(f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_ARGUMENTS}}}]'),
        weather(
            f"Hi[TOOL_CALLS]get_weather{_ARGUMENTS}[TOOL_CALLS]get_weather{_ARGUMENTS}", "Hi", 2
        ),
        weather(f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{_ARGUMENTS}"),
        Example("[TOOL_CALLS]now{}", calls=(("now", {}),)),
    )

    def identity(self, index: int) -> str | None:
        """Return nine letters and digits, as Mistral's templates require, unique per turn."""
        seed = f"{index} {self.context.prompt_tail}".encode()
        number = int.from_bytes(hashlib.blake2b(seed, digest_size=16).digest())
        return "".join(_LETTERS[number // len(_LETTERS) ** n % len(_LETTERS)] for n in range(9))

    @property
    def words(self) -> tuple[str, ...]:
        return ("[ARGS]", "[CALL_ID]")

    def layout(self) -> Layout:
        return Layout(self.examples[0].text, between="")

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        yield from source.space()
        if (yield from source.peek()) in "[{":
            yield from super().read(message, opener)
            return
        name = yield from source.run(_NAME)
        identity = None
        if (yield from source.expect(markers("[CALL_ID]"))):
            identity = yield from source.run(_IDENTITY)
        yield from source.expect(markers("[ARGS]"))
        yield from source.space()
        if (yield from source.peek()) != "{":
            raise NotACall
        message.start(name, identity)
        yield from read_json(source, message.raw_arguments)
        message.end_raw()


class MistralReasoningParser(Thoughts):
    """Special tokens, or the tags of older models; without either there is no reasoning."""

    name = "mistral"
    api = 1
    template_switches: ClassVar[Mapping[str, tuple[object, object]]] = {
        "reasoning_effort": ("none", "high")
    }
    template_efforts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("minimal", "low", "medium", "xhigh", "max"), "high"
    )
    opening = ("[THINK]", "<think>")
    closing = ("[/THINK]", "</think>")
    prompt_opens = False
    ends = ("[TOOL_CALLS]",)
    examples = (
        thought("[THINK]Hm.[/THINK]Hi"),
        thought("<think>\nHm.\n</think>\nHi"),
        Example("Hi", "Hi"),
    )
