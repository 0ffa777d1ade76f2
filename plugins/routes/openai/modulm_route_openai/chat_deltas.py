"""Deltas of streamed chat answers, and what whole answers say in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolStart
from modulm_parsing import new_call_id
from modulm_route_openai.answers import add_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.parser import Event
    from modulm_route_openai.chat_job import ChatJob
    from modulm_route_openai.objects import (
        ApprovalRequest,
        ChatChunkChoice,
        ChatDelta,
        FunctionDelta,
        ToolCallDelta,
    )
    from modulm_server.hosted_turns import HostedCall

__all__ = ["ChatDeltas", "approval_labels", "call_chunk", "opening_of", "reason_of"]


class ChatDeltas:
    """Converts the parser events of one choice to OpenAI's deltas."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self.called = False

    def convert(self, events: Sequence[Event]) -> ChatDelta:
        """Merge events into one delta."""
        delta: ChatDelta = {}
        for event in events:
            match event:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    thought = delta.get("reasoning", "") + text
                    delta["reasoning"] = delta["reasoning_content"] = thought
                case ToolStart(index, name, call_id) if self._includes(index):
                    self.called = True
                    function: FunctionDelta = {"name": name, "arguments": ""}
                    called = call_id or new_call_id()
                    call: ToolCallDelta = {
                        "index": index, "id": called, "type": "function", "function": function
                    }  # fmt: skip
                    delta.setdefault("tool_calls", []).append(call)
                    if labels := approval_labels(self._job, [call]):
                        delta.setdefault("mcp_approval_requests", []).extend(labels)
                case ToolArguments(index, text) if self._includes(index):
                    add_arguments(delta.setdefault("tool_calls", []), index, text)
        return delta

    def _includes(self, index: int) -> bool:
        return index == 0 or not self._job.single_call


def opening_of(job: ChatJob, index: int) -> ChatChunkChoice:
    delta: ChatDelta = {"role": job.role, "content": job.echo}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def call_chunk(call: HostedCall) -> ChatChunkChoice:
    delta: ChatDelta = {"mcp_calls": [call]}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def approval_labels(job: ChatJob, calls: Sequence[Any]) -> list[ApprovalRequest]:
    """Which of the client's calls are of tool servers, and wait for an approval."""
    tools = job.hosted.by_name
    return [
        {"id": call["id"], "server_label": tool.label, "name": tool.name}
        for call in calls
        if (tool := tools.get(call["function"]["name"])) is not None
    ]


def reason_of(job: ChatJob, reason: str, called: bool) -> str:
    """ "tool_calls" if the model chose to call; "stop" for a tool named by the request."""
    is_named = not isinstance(job.turn.tool_choice, str)
    return "tool_calls" if called and reason == "stop" and not is_named else reason
