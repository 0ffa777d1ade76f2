"""What the model said as Anthropic's content blocks, whole and in pieces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolStart
from modulm_parsing import new_call_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.parser import Event
    from modulm_parsing import ParsedMessage

__all__ = ["Events", "blocks_of", "stop_of", "usage_of"]

_STOPS = {"stop": "end_turn", "length": "max_tokens"}


def blocks_of(parsed: ParsedMessage, thinking: bool, single: bool) -> list[dict[str, Any]]:
    """The blocks of a whole message."""
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning and thinking:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content:
        blocks.append({"type": "text", "text": parsed.content})
    for call in parsed.tool_calls[:1] if single else parsed.tool_calls:
        made = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**made, "input": _object(call.arguments)})
    return blocks


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; those of a call that was cut are no JSON, and so none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def stop_of(reason: str | None, stop: Any, called: bool) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
    if reason == "stop" and called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOPS.get(reason or "", reason), "stop_sequence": None}


def usage_of(output: Any, generated: int) -> dict[str, Any]:
    """Tokens read, found in the cache, and written."""
    cached = output.num_cached_tokens or 0
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


class Events:
    """Parser events as the events of content blocks: one block is open at a time."""

    def __init__(self, thinking: bool, single: bool) -> None:
        self._thinking = thinking
        self._single = single
        self._open: str | None = None
        self._index = -1
        self.called = False

    def of(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """What to send for these."""
        sent: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content(text):
                    sent += self._within("text", {"type": "text", "text": ""})
                    sent.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text) if self._thinking:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    sent += self._within("thinking", block)
                    sent.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case ToolStart(index, name, call_id) if self._wanted(index):
                    self.called = True
                    made = {"type": "tool_use", "id": call_id or new_call_id(), "name": name}
                    sent += self._within(f"tool {index}", {**made, "input": {}})
                case ToolArguments(index, text) if self._wanted(index):
                    delta = {"type": "input_json_delta", "partial_json": text}
                    sent.append(self._delta(delta))
        return sent

    def close(self) -> list[dict[str, Any]]:
        """The end of the block that is open."""
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _wanted(self, index: int) -> bool:
        return index == 0 or not self._single

    def _within(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        sent = self.close()
        self._open = kind
        self._index += 1
        return [
            *sent,
            {"type": "content_block_start", "index": self._index, "content_block": block},
        ]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
