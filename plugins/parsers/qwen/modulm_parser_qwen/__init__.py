"""Reasoning of Qwen 3: text between `<think>` tags before the answer.

Source: the chat templates of the Qwen 3 checkpoints. Some open the thought in the prompt, some
leave it to the model; `enable_thinking=False` closes an empty thought in the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.contracts.parser import (
    Content,
    Event,
    Example,
    ParseContext,
    Reasoning,
    ReasoningParser,
)
from modulm_parsing import Cursor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Qwen3ReasoningParser"]

OPEN, CLOSE, CALL = "<think>", "</think>", "<tool_call>"


class Qwen3ReasoningParser(ReasoningParser):
    """Starts inside the thought when the prompt opened it, or when the prompt is not known and
    thinking is not switched off; else a thought begins only with a leading `<think>`.

    A tool call ends the thought as its closing tag does. Line feeds beside the tags are framing.
    """

    name = "qwen3"
    api = 1
    examples = (
        Example("<think>\nHm.\n</think>\n\nHi", content="Hi", reasoning="Hm."),
        Example("Hm.\n</think>\n\nHi", content="Hi", reasoning="Hm."),
        Example(
            "The `</think>` tag ends this.</think>Hi",
            content="Hi",
            reasoning="The `</think>` tag ends this.",
        ),
        Example("Hi", content="Hi", context=ParseContext(prompt_tail="<|im_start|>assistant\n")),
        Example("Hi", content="Hi", context=ParseContext(prompt_tail="<think>\n\n</think>\n\n")),
        Example("Hm.", reasoning="Hm.", context=ParseContext(prompt_tail="<think>\n")),
    )

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        self._cursor = Cursor()
        self._step = self._before
        self._opened = _opened(context)
        self._held = ""  # white space that belongs to the thought only if more of it follows

    @property
    def reasoning(self) -> bool:
        inside = self._step in (self._think_opens, self._thinking)
        return inside or (self._step == self._before and self._opened)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        self._cursor.push(text)
        return self._run(final=False)

    def finish(self) -> list[Event]:
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Event]:
        events: list[Event] = []
        step = None
        while step != self._step:
            step = self._step
            events += step(final=final)
        return events

    def _before(self, *, final: bool) -> list[Event]:
        """Nothing but white space so far: does a thought begin?"""
        if not self._opened and self._switched_off():
            self._step = self._answer
            return []
        self._held += self._cursor.space()
        starts = self._cursor.starts(OPEN)
        if (starts is None or self._cursor.empty) and not final:
            return []
        if starts and not self._cursor.empty:
            self._cursor.take(len(OPEN))
            self._step, self._held = self._think_opens, ""
        elif self._opened:
            self._step, self._held = self._thinking, ""
        else:
            self._step = self._answer
            held, self._held = self._held, ""
            return [Content(held)] if held else []
        return []

    def _think_opens(self, *, final: bool) -> list[Event]:
        self._cursor.space()
        if not self._cursor.empty:
            self._step = self._thinking
        return []

    def _thinking(self, *, final: bool) -> list[Event]:
        text, marker = self._cursor.until((CLOSE, CALL), final=final)
        text = self._held + text
        kept = text.rstrip()
        self._held = "" if marker else text[len(kept) :]
        events: list[Event] = [Reasoning(kept)] if kept else []
        if marker == CLOSE:
            self._step = self._answer_opens
        elif marker == CALL:
            self._step = self._answer
            events.append(Content(CALL))
        return events

    def _answer_opens(self, *, final: bool) -> list[Event]:
        self._cursor.space()
        if not self._cursor.empty:
            self._step = self._answer
        return []

    def _answer(self, *, final: bool) -> list[Event]:
        text = self._cursor.rest()
        return [Content(text)] if text else []

    def _switched_off(self) -> bool:
        tail = self.context.prompt_tail
        closed = tail is not None and tail.rstrip().endswith(CLOSE)
        return closed or self.context.template_kwargs.get("enable_thinking") is False


def _opened(context: ParseContext) -> bool:
    if context.prompt_tail is None:
        return context.template_kwargs.get("enable_thinking") is not False
    return context.prompt_tail.rstrip().endswith(OPEN)
