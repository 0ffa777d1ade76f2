"""LLM360 K2 Horizon: IFM tags around tool calls and reasoning.

Source: the chat template of K2 Horizon. `tool_call_format` selects pairs, typed pairs or JSON, all
of which are accepted; `reasoning_effort` selects one of three reasoning tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from modulm_parsing import PairCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["K2HorizonReasoningParser", "K2HorizonToolParser"]

_TAGS = ("think", "think_fast", "think_faster")


class K2HorizonToolParser(PairCalls):
    """Types are written out, or come from the tool's schema."""

    name = "k2_horizon"
    api = 1
    group = ("<ifm|tool_calls>", "</ifm|tool_calls>")
    call = ("<ifm|tool_call>", "</ifm|tool_call>")
    key = ("<ifm|arg_key>", "</ifm|arg_key>")
    value = ("<ifm|arg_value>", "</ifm|arg_value>")
    type = ("<ifm|arg_type>", "</ifm|arg_type>")
    examples = (
        weather(
            "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n"
            "<ifm|arg_value>Oslo</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n"
            "<ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>"
        ),
        weather(
            "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n"
            "<ifm|arg_type>string</ifm|arg_type>\n<ifm|arg_value>Oslo</ifm|arg_value>\n"
            "<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_type>number</ifm|arg_type>\n"
            "<ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>"
        ),
        weather(
            '<ifm|tool_calls>\n<ifm|tool_call>{"name": "get_weather", "arguments": '
            '{"city": "Oslo", "days": 3}}</ifm|tool_call>\n</ifm|tool_calls>'
        ),
    )


class K2HorizonReasoningParser(Thoughts):
    """Tool calls end reasoning."""

    name = "k2_horizon"
    api = 1
    template_efforts: ClassVar[Mapping[str, str]] = {
        "none": "low", "minimal": "low", "xhigh": "high", "max": "high",
    }  # fmt: skip
    opening = tuple(f"<ifm|{tag}>" for tag in _TAGS)
    closing = tuple(f"</ifm|{tag}>" for tag in _TAGS)
    ends = ("<ifm|tool_calls>",)
    examples = (
        thought("Hm.</ifm|think>\n\nHi", reasoning_effort="high"),
        thought("<ifm|think_fast>Hm.</ifm|think_fast>\n\nHi", reasoning_effort="low"),
    )
