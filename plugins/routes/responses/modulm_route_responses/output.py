"""What the model said as output items, and the events that announce them as they grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolEnd, ToolStart
from modulm_parsing import new_call_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from modulm.contracts.parser import Event

__all__ = ["Output"]


class Output:
    """The items of one response. Feeding events gives what a stream sends for them.

    `single`: only the first tool call counts.
    """

    def __init__(self, single: bool = False) -> None:
        self.items: list[dict[str, Any]] = []
        self._single = single
        self._open: str | None = None

    def feed(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Take events; the generator must be used up."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._message()
                    yield self._grow(0, text, "response.output_text.delta", logprobs=[])
                case Reasoning(text):
                    yield from self._reasoning()
                    yield self._grow(0, text, "response.reasoning_text.delta")
                case ToolStart(index, name, call_id) if self._wanted(index):
                    yield from self._call(index, name, call_id or new_call_id())
                case ToolArguments(index, text) if self._wanted(index):
                    self.items[-1]["arguments"] += text
                    yield self._about("response.function_call_arguments.delta", delta=text)
                case ToolEnd(index) if self._wanted(index):
                    yield from self.close()

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is open."""
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self.items[-1]
        item["status"] = status
        if kind == "message":
            text = item["content"][0]["text"]
            yield self._about("response.output_text.done", content_index=0, text=text, logprobs=[])
            yield self._about(
                "response.content_part.done", content_index=0, part=item["content"][0]
            )
        elif kind == "reasoning":
            text = item["content"][0]["text"]
            yield self._about("response.reasoning_text.done", content_index=0, text=text)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._about("response.function_call_arguments.done", **done)
        yield {**self._place("response.output_item.done"), "item": _copy(item)}

    def _wanted(self, index: int) -> bool:
        return index == 0 or not self._single

    def _message(self) -> Iterator[dict[str, Any]]:
        if self._open == "message":
            return
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        yield from self._begin(
            "message", {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}
        )
        yield self._about("response.content_part.added", content_index=0, part=dict(part))
        self.items[-1]["content"].append(part)

    def _reasoning(self) -> Iterator[dict[str, Any]]:
        if self._open == "reasoning":
            return
        item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": []}
        yield from self._begin("reasoning", item)
        self.items[-1]["content"].append({"type": "reasoning_text", "text": ""})

    def _call(self, index: int, name: str, call_id: str) -> Iterator[dict[str, Any]]:
        yield from self._begin(
            f"call {index}",
            {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": call_id,
                "name": name,
                "arguments": "",
            },
        )

    def _begin(self, kind: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._open = kind
        self.items.append({**item, "status": "in_progress"})
        yield {**self._place("response.output_item.added"), "item": _copy(self.items[-1])}

    def _grow(self, part: int, text: str, kind: str, **fields: Any) -> dict[str, Any]:
        self.items[-1]["content"][part]["text"] += text
        return self._about(kind, content_index=part, delta=text, **fields)

    def _about(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {**self._place(kind), "item_id": self.items[-1]["id"], **fields}

    def _place(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now: what is sent must not change with it."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}
