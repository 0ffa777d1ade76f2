"""ByteDance Seed-OSS: tool calls as XML-like functions and reasoning, in `seed` tags.

Source: the chat template of Seed-OSS, which supports a `thinking_budget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from modulm.contracts.parser import Example
from modulm_parsing import Thoughts, XmlCalls
from modulm_parsing.examples import thought, weather

__all__ = ["SeedOssReasoningParser", "SeedOssToolParser"]


class SeedOssToolParser(XmlCalls):
    """As Qwen Coder, with other tags."""

    name = "seed_oss"
    api = 1
    outer = ("<seed:tool_call>", "</seed:tool_call>")
    call = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    examples = (
        weather(
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
            "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
        ),
    )


class SeedOssReasoningParser(Thoughts):
    """The model writes both tags."""

    name = "seed_oss"
    api = 1
    template_switches: ClassVar[Mapping[str, tuple[object, object]]] = {
        "thinking_budget": (0, None)
    }
    opening = ("<seed:think>",)
    closing = ("</seed:think>",)
    prompt_opens = False
    ends = ("<seed:tool_call>",)
    examples = (thought("<seed:think>Hm.</seed:think>Hi"), Example("Hi", "Hi"))
