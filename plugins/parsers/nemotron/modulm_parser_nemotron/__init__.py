"""Reasoning of NVIDIA Nemotron 3, as Qwen's. Its tool calls are those of `qwen3_coder`.

Source: the chat template of Nemotron 3, with the keyword `force_nonempty_content`.
"""

from __future__ import annotations

from collections.abc import Callable

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import MessageReader, Steps, Thoughts
from modulm_parsing.examples import thought
from modulm_parsing.thoughts import Pen

__all__ = ["NemotronV3ReasoningParser"]

_FORCED = ParseContext(template_kwargs={"force_nonempty_content": True})


class NemotronV3ReasoningParser(Thoughts):
    """With `force_nonempty_content`, the reasoning of a message without an answer becomes its
    content.

    This is known only at the end, so such reasoning is not streamed.
    """

    name = "nemotron_v3"
    api = 1
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    examples = (
        thought("Hm.\n</think>\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
        Example("Hm.\n</think>\n", "Hm.", context=_FORCED),
        Example("Hm.", "Hm.", context=_FORCED),
        Example("Hm.</think>Hi", "Hi", "Hm.", context=_FORCED),
    )

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        self._forced = context.template_kwargs.get("force_nonempty_content") is True
        self._buffer: list[str] = []

    def writer(self, message: MessageReader) -> Callable[[str], None]:
        return self._buffer.append if self._forced else message.reasoning

    def cut(self, message: MessageReader) -> None:
        message.content(self._drain())

    def after(self, message: MessageReader, word: str) -> Steps[None]:
        yield from message.source.space()
        if self._forced and (yield from message.source.over()):
            message.content(self._drain())
        message.reasoning(self._drain())

    def call(self, message: MessageReader, word: str | None, pen: Pen) -> Steps[bool]:
        if word is not None:
            message.reasoning(self._drain())
        return (yield from super().call(message, word, pen))

    def _drain(self) -> str:
        text, self._buffer[:] = "".join(self._buffer), []
        return text
