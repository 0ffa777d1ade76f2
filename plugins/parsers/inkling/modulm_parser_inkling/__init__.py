"""Inkling: typed blocks of reasoning, text and tool calls, in any order, each closed by the same
token.

Source: the chat template of Inkling; a prompt ends with `<|message_model|>`.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import CallKeys, JsonCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["InklingReasoningParser", "InklingToolParser"]

_FRAMING = (
    "<|message_model|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)


class InklingToolParser(JsonCalls):
    """A call is an object with `name` and `args`."""

    name = "inkling"
    api = 1
    openers = ("<|content_invoke_tool_json|>",)
    closers = ("<|end_message|>",)
    framing = _FRAMING
    keys = CallKeys(arguments=("args", "arguments"))
    examples = (
        weather(
            '<|content_invoke_tool_json|>{"name": "get_weather", "args": '
            '{"city": "Oslo", "days": 3}}<|end_message|>'
        ),
        weather(
            "<|content_text|>Let me see.<|end_message|><|message_model|>"
            '<|content_invoke_tool_json|>{"name": "get_weather", "args": '
            '{"city": "Oslo", "days": 3}}<|end_message|>',
            "Let me see.",
        ),
    )


class InklingReasoningParser(Thoughts):
    """Reasoning may occur anywhere in the message."""

    name = "inkling"
    api = 1
    opening = ("<|content_thinking|>",)
    closing = ("<|end_message|>",)
    framing = _FRAMING
    prompt_opens = False
    anywhere = True
    examples = (
        thought(
            "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Hi"
            "<|end_message|>"
        ),
        Example(
            "<|content_text|>A<|end_message|><|message_model|><|content_thinking|>Hm."
            "<|end_message|><|message_model|><|content_text|>B<|end_message|>",
            "AB",
            "Hm.",
        ),
    )
