"""Tool calls of Liquid AI LFM2 and 2.5: a Python list between special tokens.

Source: the chat template of LFM2.
"""

from __future__ import annotations

from modulm_parsing import PythonCalls
from modulm_parsing.examples import weather

__all__ = ["Lfm2ToolParser"]


class Lfm2ToolParser(PythonCalls):
    """Text may follow the list."""

    name = "lfm2"
    api = 1
    openers = ("<|tool_call_start|>",)
    closers = ("<|tool_call_end|>",)
    examples = (
        weather("<|tool_call_start|>[get_weather(city='Oslo', days=3)]<|tool_call_end|>"),
        weather(
            "<|tool_call_start|>[get_weather(city='Oslo', days=3)]<|tool_call_end|>Wait.", "Wait."
        ),
    )
