"""Converts parser events to Anthropic's content blocks, whole or streamed."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolStart
from modulm_parsing import new_call_id, parse_arguments
from modulm_server.hosted_turns import TOO_MANY_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from modulm.contracts.parser import Event
    from modulm_route_anthropic import objects
    from modulm_server.hosted_turns import HostedCall

__all__ = ["Events", "blocks_of", "stop_of", "usage_of", "written"]

_STOPS = {"stop": "end_turn", "length": "max_tokens", "repetition": "end_turn"}
#: The stop reason of an answer that stopped making calls; a client that sends it back goes on.
_PAUSED = "pause_turn"


def blocks_of(sent_events: Iterable[objects.Event]) -> list[Any]:
    """The content blocks of a complete message, in order."""
    blocks: list[Any] = []
    for sent in sent_events:
        if sent["type"] == "content_block_start":
            blocks.append(sent["content_block"])
        elif sent["type"] == "content_block_delta":
            _grow(blocks[-1], sent["delta"])
    for block in blocks:
        if block["type"] in ("tool_use", "mcp_tool_use"):
            block["input"] = parse_arguments(block["input"] or "")
    return blocks


_GROWS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}


def _grow(block: Any, delta: Mapping[str, Any]) -> None:
    name, source = _GROWS[delta["type"]]
    block[name] = (block[name] or "") + delta[source]


def stop_of(reason: str | None, stop: Any, called: bool) -> objects.Stop:
    """`stop_reason` and `stop_sequence`."""
    if stop == TOO_MANY_CALLS:
        return {"stop_reason": _PAUSED, "stop_sequence": None}
    if reason == "stop" and called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOPS.get(reason or "", reason), "stop_sequence": None}


def usage_of(
    prompt: int,
    cached: int,
    created: Mapping[int, int],
    generated: int,
    thought: int | None = None,
) -> objects.Usage:
    """Token usage. created: newly held tokens, by the seconds that they are held; thought: thinking
    tokens among the generated ones.
    """
    creation = sum(created.values())
    return {
        "input_tokens": prompt - cached - creation,
        "cache_creation_input_tokens": creation,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created.get(300, 0),
            "ephemeral_1h_input_tokens": created.get(3600, 0),
        },
        **written(generated, thought),
    }


def written(generated: int, thought: int | None) -> objects.Written:
    """The output part of the usage."""
    if thought is None:
        return {"output_tokens": generated}
    details: objects.Thoughts = {"thinking_tokens": thought}
    return {"output_tokens": generated, "output_tokens_details": details}


class Events:
    """Converts parser events to events of content blocks, of which one is open at a time.

    single: keep only the first call. omitted: leave out the text of thoughts. A thought's signature
    is a digest of its text: clients drop thoughts without one; the server never checks it.
    """

    def __init__(self, single: bool, omitted: bool = False) -> None:
        self._omitted = omitted
        self._single = single
        self._signature = sha256()
        self._open: str | None = None
        self._index = -1
        self.called = False

    def convert(self, events: Sequence[Event]) -> list[objects.Event]:
        """Convert parser events."""
        sent: list[objects.Event] = []
        for event in events:
            match event:
                case Content(text):
                    sent += self._within("text", {"type": "text", "text": ""})
                    sent.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text):
                    sent += self._within(
                        "thinking", {"type": "thinking", "thinking": "", "signature": ""}
                    )
                    self._signature.update(text.encode("utf-8", "surrogatepass"))
                    if not self._omitted:
                        sent.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case ToolStart(index, name, call_id) if self._includes(index):
                    self.called = True
                    called = call_id or new_call_id()
                    sent += self._within(
                        f"tool {index}",
                        {"type": "tool_use", "id": called, "name": name, "input": {}},
                    )
                case ToolArguments(index, text) if self._includes(index):
                    sent.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return sent

    def add_call(self, call: HostedCall) -> list[objects.Event]:
        """The blocks of a call that the server made, and of its result."""
        name = f"server {call['id']}"
        sent = self._within(
            name,
            {
                "type": "mcp_tool_use", "id": call["id"], "name": call["name"],
                "server_name": call["server_label"], "input": {},
            },
        )  # fmt: skip
        sent.append(self._delta({"type": "input_json_delta", "partial_json": call["arguments"]}))
        output = call["output"] if call["error"] is None else call["error"]
        sent += self._within(
            f"result of {name}",
            {
                "type": "mcp_tool_result", "tool_use_id": call["id"],
                "is_error": call["error"] is not None,
                "content": [{"type": "text", "text": output or ""}],
            },
        )  # fmt: skip
        return [*sent, *self.close()]

    def close(self) -> list[objects.Event]:
        """Close the open block."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        stop: objects.BlockStop = {"type": "content_block_stop", "index": self._index}
        if kind != "thinking":
            return [stop]
        signature, self._signature = self._signature.hexdigest(), sha256()
        return [self._delta({"type": "signature_delta", "signature": signature}), stop]

    def _includes(self, index: int) -> bool:
        return index == 0 or not self._single

    def _within(self, kind: str, block: objects.Block) -> list[objects.Event]:
        if self._open == kind:
            return []
        sent = self.close()
        self._open = kind
        self._index += 1
        return [
            *sent,
            {"type": "content_block_start", "index": self._index, "content_block": block},
        ]

    def _delta(self, delta: objects.BlockDelta) -> objects.BlockGrows:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
