"""Cohere Command: reasoning, actions and an answer, each between special tokens.

Source: the chat templates of Command A, Command A Reasoning and the Command 4 models. The
`tool_call_id` that the model writes numbers the actions of one message; it is not used as the
call's id.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import CallKeys, JsonCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = [
    "Command3ReasoningParser",
    "Command3ToolParser",
    "Command4ReasoningParser",
    "Command4ToolParser",
]

_CALL = """<|START_ACTION|>[
    {
        "tool_call_id": "0",
        "tool_name": "get_weather",
        "parameters": {
            "city": "Oslo",
            "days": 3
        }
    }
]<|END_ACTION|>"""


class Command3ToolParser(JsonCalls):
    """Calls are a list of actions. The markers around an answer are not part of it."""

    name = "cohere_command3"
    api = 1
    openers = ("<|START_ACTION|>",)
    closers = ("<|END_ACTION|>",)
    framing = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    keys = CallKeys(name=("tool_name", "name"), arguments=("parameters", "arguments"))
    examples = (
        weather(_CALL),
        Example("<|START_RESPONSE|>Hi<|END_RESPONSE|>", content="Hi"),
    )


class Command4ToolParser(Command3ToolParser):
    """As Command 3, with text tokens around the answer."""

    name = "cohere_command4"
    api = 1
    framing = ("<|START_TEXT|>", "<|END_TEXT|>")
    examples = (weather(_CALL), Example("<|START_TEXT|>Hi<|END_TEXT|>", content="Hi"))


class Command3ReasoningParser(Thoughts):
    """An action ends reasoning."""

    name = "cohere_command3"
    api = 1
    opening = ("<|START_THINKING|>",)
    closing = ("<|END_THINKING|>",)
    framing = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    prompt_opens = False
    ends = ("<|START_ACTION|>",)
    examples = (
        thought("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>"),
        Example("<|START_RESPONSE|>Hi<|END_RESPONSE|>", content="Hi"),
        Example("Hi", content="Hi"),
    )


class Command4ReasoningParser(Command3ReasoningParser):
    """As Command 3, with text tokens around the answer."""

    name = "cohere_command4"
    api = 1
    framing = ("<|START_TEXT|>", "<|END_TEXT|>")
    examples = (
        thought("<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>"),
        Example("<|START_TEXT|>Hi<|END_TEXT|>", content="Hi"),
    )
