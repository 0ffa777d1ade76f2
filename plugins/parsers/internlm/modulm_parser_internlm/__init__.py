"""Tool calls of InternLM 2 and 2.5: one JSON object for the plugin.

Source: the chat template of InternLM2; `<|interpreter|>` marks code, which is not a call.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import JsonCalls, MessageReader, NotACall, Steps, markers
from modulm_parsing.examples import weather

__all__ = ["InternlmToolParser"]


class InternlmToolParser(JsonCalls):
    """Arguments are called `parameters`."""

    name = "internlm"
    api = 1
    openers = ("<|action_start|>",)
    closers = ("<|action_end|>",)
    examples = (
        weather(
            '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
            '{"city": "Oslo", "days": 3}}<|action_end|>'
        ),
        Example(
            "<|action_start|><|interpreter|>\n1 + 1<|action_end|>",
            "<|action_start|><|interpreter|>\n1 + 1<|action_end|>",
        ),
    )

    @property
    def words(self) -> tuple[str, ...]:
        return ("<|plugin|>", *self.closers)

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        yield from message.source.space()
        if not (yield from message.source.expect(markers("<|plugin|>"))):
            raise NotACall
        yield from super().read(message, opener)
