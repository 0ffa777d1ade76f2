"""Converts parser events to Cohere's messages and stream events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolStart
from modulm_parsing import new_call_id, parse_arguments
from modulm_server.logprobs import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from modulm.contracts.outputs import Position
    from modulm.contracts.parser import Event
    from modulm_parsing import ParsedMessage
    from modulm_route_cohere.objects import Logprobs, Message, OldToolCall, StreamEvent, Usage

__all__ = [
    "Events",
    "finish_of",
    "logprobs_of",
    "message_of",
    "old_calls_of",
    "usage_of",
]

_FINISHES = {"stop": "COMPLETE", "length": "MAX_TOKENS", "repetition": "COMPLETE"}


def finish_of(reason: str | None, stop: int | str | None, *, called: bool) -> str:
    """`finish_reason`. called: the answer has tool calls."""
    if reason == "stop" and called:
        return "TOOL_CALL"
    if reason == "stop" and isinstance(stop, str):
        return "STOP_SEQUENCE"
    return _FINISHES.get(reason or "", "ERROR")


def usage_of(prompt: int, cached: int, generated: int) -> Usage:
    """Token usage."""
    tokens: Any = {"input_tokens": prompt, "output_tokens": generated}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": cached}


def message_of(parsed: ParsedMessage) -> Message:
    """A complete message: thoughts, then text or calls."""
    content: list[Any] = []
    if parsed.reasoning:
        content.append({"type": "thinking", "thinking": parsed.reasoning})
    if parsed.content:
        content.append({"type": "text", "text": parsed.content})
    message: Message = {"role": "assistant"}
    if content:
        message["content"] = content
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    return message


def old_calls_of(parsed: ParsedMessage) -> list[OldToolCall]:
    """The calls of a message in version 1, which has arguments as objects."""
    return [
        {"name": call.name, "parameters": parse_arguments(call.arguments)}
        for call in parsed.tool_calls
    ]


def logprobs_of(positions: Sequence[Position] | None, ids: Sequence[int]) -> list[Logprobs]:
    """One entry per token."""
    if positions is None:
        return []
    return [
        {"text": entry["token"], "token_ids": [token], "logprobs": [entry["logprob"]]}
        for token, entry in zip(ids, token_logprobs(positions, ids, 0, False), strict=True)
    ]


class Events:
    """Converts parser events to stream events. One content block or call is open at a time.

    Blocks and calls are counted separately.
    """

    def __init__(self) -> None:
        self._open: tuple[str, int] | None = None
        self._blocks = 0
        self.called = False

    def convert(self, events: Sequence[Event]) -> Iterator[StreamEvent]:
        """Convert parser events."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._write("text", text)
                case Reasoning(text):
                    yield from self._write("thinking", text)
                case ToolStart(index, name, call_id):
                    yield from self.close()
                    self._open, self.called = ("tool-call", index), True
                    function = {"name": name, "arguments": ""}
                    call = {"id": call_id or new_call_id(), "type": "function"}
                    yield _event(
                        "tool-call-start", index, tool_calls={**call, "function": function}
                    )
                case ToolArguments(index, text):
                    function = {"arguments": text}
                    yield _event("tool-call-delta", index, tool_calls={"function": function})

    def close(self) -> Iterator[StreamEvent]:
        """End the open block or call."""
        if self._open is None:
            return
        (kind, index), self._open = self._open, None
        name = "tool-call-end" if kind == "tool-call" else "content-end"
        yield {"type": name, "index": index}

    def _write(self, kind: str, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open[0] != kind:
            yield from self.close()
            self._open = (kind, self._blocks)
            self._blocks += 1
            yield _event("content-start", self._open[1], content={"type": kind, kind: ""})
        yield _event("content-delta", self._open[1], content={kind: text})


def _event(name: str, index: int, **message: Any) -> StreamEvent:
    return {"type": name, "index": index, "delta": {"message": message}}
