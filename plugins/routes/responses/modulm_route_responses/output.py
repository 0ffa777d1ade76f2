"""Builds the output items of a response, and the events of their stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolEnd, ToolStart
from modulm_parsing import new_call_id
from modulm_server.logprobs import TokenLogprob, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from modulm.contracts.outputs import Position
    from modulm.contracts.parser import Event
    from modulm_server.chat_turn import Delta
    from modulm_server.hosted_tools import HostedTool

__all__ = ["LogprobsOf", "Output"]


class LogprobsOf:
    """Finds the log probabilities of the text for the user.

    Parsers return text without token boundaries. If a delta is only text, the text gets all its
    tokens. If the text starts within a delta, or earlier text was held back, it gets the last
    tokens that spell it. special: ids of special tokens. top: top candidates per position.
    """

    def __init__(self, special: frozenset[int], top: int) -> None:
        self._special = special
        self._top = top
        self._pending: list[tuple[int, Position]] = []

    def match(self, events: Sequence[Event], delta: Delta) -> list[TokenLogprob]:
        """The log probabilities of the text among the events."""
        whole = not self._pending and all(isinstance(event, Content) for event in events)
        self._pending += [
            pair
            for pair in zip(delta.token_ids, delta.logprobs or (), strict=False)
            if pair[0] not in self._special
        ]
        text = "".join(event.text for event in events if isinstance(event, Content))
        if not events:
            return []
        pending, self._pending = self._pending, []
        if not text:
            return []
        if not whole:
            pending = pending[
                _last_spelling([pos[token].decoded_token or "" for token, pos in pending], text) :
            ]
        positions = [position for _, position in pending]
        return token_logprobs(positions, [token for token, _ in pending], self._top, False)


def _last_spelling(tokens: Sequence[str], text: str) -> int:
    """The index from which the last tokens spell the text.

    Tokens that are parts of a character belong together.
    """
    first, length = len(tokens), 0
    while first and (length < len(text) or "\ufffd" in tokens[first - 1]):
        first -= 1
        length += len(tokens[first])
    return first


class Output:
    """The output items of a response. `feed` converts parser events to stream events.

    single: keep only the first tool call. logprobs: finds log probabilities, if requested. hosted:
    the tools that the server calls, by the model's names.
    """

    def __init__(
        self,
        single: bool = False,
        logprobs: LogprobsOf | None = None,
        hosted: Mapping[str, HostedTool] | None = None,
    ) -> None:
        self.items: list[Any] = []
        self._hosted = hosted or {}
        self._single = single
        self._logprobs = logprobs
        self._open: str | None = None

    def feed(self, events: Sequence[Event], delta: Delta | None = None) -> Iterator[dict[str, Any]]:
        """Convert the events of a delta. The returned generator must be exhausted."""
        logprobs = (
            [] if self._logprobs is None or delta is None else self._logprobs.match(events, delta)
        )
        for event in events:
            match event:
                case Content(text):
                    yield from self._message()
                    if logprobs:
                        self.items[-1]["content"][0]["logprobs"] += logprobs
                    yield self._grow(0, text, "response.output_text.delta", logprobs=logprobs)
                    logprobs = []
                case Reasoning(text):
                    yield from self._reasoning()
                    yield self._grow(0, text, "response.reasoning_text.delta")
                case ToolStart(index, name, call_id) if self._includes(index):
                    yield from self._call(index, name, call_id or new_call_id())
                case ToolArguments(index, text) if self._includes(index):
                    self.items[-1]["arguments"] += text
                    if prefix := _ARGUMENTS.get(self.items[-1]["type"]):
                        yield self._about(f"{prefix}.delta", delta=text)
                case ToolEnd(index) if self._includes(index):
                    yield from self.close()

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Close the open item."""
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self.items[-1]
        if item["type"] == "mcp_call":  # its end is the end of the call
            item["status"] = "in_progress" if status == "completed" else status
            yield self._about("response.mcp_call_arguments.done", arguments=item["arguments"])
            return
        item["status"] = status
        if kind == "message":
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part.get("logprobs", [])}
            yield self._about("response.output_text.done", content_index=0, **done)
            yield self._about("response.content_part.done", content_index=0, part=_part(part))
        elif kind == "reasoning":
            text = item["content"][0]["text"]
            yield self._about("response.reasoning_text.done", content_index=0, text=text)
        elif item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._about("response.function_call_arguments.done", **done)
        yield {**self._item_position("response.output_item.done"), "item": _copy(item)}

    def _includes(self, index: int) -> bool:
        return index == 0 or not self._single

    def _message(self) -> Iterator[dict[str, Any]]:
        if self._open == "message":
            return
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if self._logprobs is not None:
            part["logprobs"] = []
        yield from self._begin(
            "message", {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}
        )
        yield self._about("response.content_part.added", content_index=0, part=_part(part))
        self.items[-1]["content"].append(part)

    def _reasoning(self) -> Iterator[dict[str, Any]]:
        if self._open == "reasoning":
            return
        item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": []}
        yield from self._begin("reasoning", item)
        self.items[-1]["content"].append({"type": "reasoning_text", "text": ""})

    def waiting(self) -> list[int]:
        """The indices of complete calls that the server must make."""
        return [
            index
            for index, item in enumerate(self.items)
            if item["type"] == "mcp_call" and item["status"] == "in_progress"
        ]

    def shown(self, index: int) -> Iterator[dict[str, Any]]:
        """The events of an item that is complete from the start."""
        for kind in ("added", "done"):
            yield {
                "type": f"response.output_item.{kind}",
                "output_index": index,
                "item": _copy(self.items[index]),
            }

    def _call(self, index: int, name: str, call_id: str) -> Iterator[dict[str, Any]]:
        if (tool := self._hosted.get(name)) is not None:
            yield from self._begin(f"call {index}", _hosted_item(tool))
            return
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
        yield {**self._item_position("response.output_item.added"), "item": _copy(self.items[-1])}

    def _grow(self, part: int, text: str, kind: str, **fields: Any) -> dict[str, Any]:
        self.items[-1]["content"][part]["text"] += text
        return self._about(kind, content_index=part, delta=text, **fields)

    def _about(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {**self._item_position(kind), "item_id": self.items[-1]["id"], **fields}

    def _item_position(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1}


#: Type of an item -> the beginning of the names of its arguments' events.
_ARGUMENTS = {
    "function_call": "response.function_call_arguments",
    "mcp_call": "response.mcp_call_arguments",
}


def _hosted_item(tool: HostedTool) -> dict[str, Any]:
    """The item of a call that the server makes, or that the client must approve first."""
    call = {"server_label": tool.label, "name": tool.name, "arguments": ""}
    if tool.approval:
        return {"id": _id("mcpr"), "type": "mcp_approval_request", **call}
    none = {"approval_request_id": None, "output": None, "error": None}
    return {"id": _id("mcp"), "type": "mcp_call", **call, **none}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Copy an item, since it changes after it was sent."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [_part(part) for part in item["content"]]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "logprobs": [*part["logprobs"]]} if "logprobs" in part else dict(part)
