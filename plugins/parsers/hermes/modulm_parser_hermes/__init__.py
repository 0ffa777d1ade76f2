"""Tool calls in Hermes form: a JSON object between `<tool_call>` tags, one block per call.

Source: the prompt format of Nous Hermes 2 Pro (github.com/NousResearch/Hermes-Function-Calling),
which the Qwen 2.5 and 3 chat templates share. Some checkpoints write `arguments` before `name`,
leave the closing tag out, or put several objects into one block: all are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.contracts.parser import Content, Event, Example, ToolParser
from modulm_parsing import CallReader, Cursor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm.contracts.parser import ParseContext

__all__ = ["HermesToolParser"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"

#: Characters read at a time: what is no object is given back, and must not cost a whole text.
CHUNK = 4096


class HermesToolParser(ToolParser):
    """Content, then calls; white space around a block is framing and is dropped.

    What follows an opening tag must be an object, else the tag was prose and stays text. A block
    that turns out not to be a call is text too, unless the call was already announced: then it
    stays open, as a call that was cut does.
    """

    name = "hermes"
    api = 1
    examples = (
        Example(
            f'{OPEN}\n{{"name": "get_weather", "arguments": {{"city": "Oslo", "days": 3}}}}\n'
            f"{CLOSE}",
            calls=(("get_weather", {"city": "Oslo", "days": 3}),),
        ),
        Example(
            f'Both:\n{OPEN}\n{{"arguments": {{"a": "}}{{"}}, "name": "f"}}\n{CLOSE}\n'
            f'{OPEN}{{"name": "g"}}',
            content="Both:",
            calls=(("f", {"a": "}{"}), ("g", {})),
        ),
        Example(
            f"A `{OPEN}` tag opens a call; so does {OPEN} alone.",
            content=f"A `{OPEN}` tag opens a call; so does {OPEN} alone.",
        ),
    )

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        self._cursor = Cursor()
        self._space = ""  # white space that is content only if more content follows
        self._calls = 0
        self._block = ""  # a block's text while it may still turn out to be prose
        self._call: CallReader | None = None
        self._inside = False
        self._after_call = False  # nothing but white space since a call

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        self._cursor.push(text)
        return self._run(final=False)

    def finish(self) -> list[Event]:
        events = self._run(final=True)
        if self._call is not None and not self._call.announced:
            events += self._content(self._block)
        elif self._space and not self._calls:
            events.append(Content(self._space))
        return events

    def structural_tag(self) -> Mapping[str, Any] | None:
        """Calls of the request's tools in this format, for a grammar backend."""
        structures = [
            {
                "begin": f'{OPEN}\n{{"name": "{tool["function"]["name"]}", "arguments": ',
                "schema": tool["function"].get("parameters") or {"type": "object"},
                "end": f"}}\n{CLOSE}",
            }
            for tool in self.context.tools
        ]
        return {"type": "structural_tag", "structures": structures, "triggers": [OPEN]}

    def _run(self, *, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            if self._call is not None:
                more, onward = self._in_call()
            elif self._inside:
                more, onward = self._in_block(final=final)
            else:
                more, onward = self._in_content(final=final)
            events += more
            if not onward:
                return events

    def _in_content(self, *, final: bool) -> tuple[list[Event], bool]:
        text, marker = self._cursor.until((OPEN,), final=final)
        events = self._content(text)
        if marker is None:
            return events, False
        self._inside, self._block = True, self._space + marker
        self._space = ""
        return events, True

    def _in_block(self, *, final: bool) -> tuple[list[Event], bool]:
        """Between a tag and an object, or after an object and before what closes the block."""
        self._block += self._cursor.space()
        head = self._cursor.peek()[:1]
        if not head:
            prose = final and self._block.strip() != ""
            return (self._prose() if prose else []), False
        if head == "{":
            self._call = CallReader(self._calls, ("arguments", "parameters"))
            return [], True
        closes = self._cursor.starts(CLOSE)
        if closes is None and not final:
            return [], False
        if closes and not self._block.strip():
            self._cursor.take(len(CLOSE))
            self._inside, self._block = False, ""
            return [], True
        return self._prose(), True

    def _prose(self) -> list[Event]:
        """The block holds no call: what was read of it is content."""
        text, self._block, self._inside = self._block, "", False
        return self._content(text)

    def _in_call(self) -> tuple[list[Event], bool]:
        call = self._call
        if call is None or self._cursor.empty:
            return [], False
        text = self._cursor.take(CHUNK)
        events, rest = call.feed(text)
        self._block = "" if call.announced else self._block + text[: len(text) - len(rest)]
        if not (call.done or call.broken):
            return events, True
        self._cursor.back(len(rest))
        self._call = None
        if call.announced:
            self._calls += 1
            self._after_call = True
        else:
            events += self._prose()
        return events, True

    def _content(self, text: str) -> list[Event]:
        text = text.lstrip() if self._after_call else self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._after_call = self._after_call and not kept
        return [Content(kept)] if kept else []
