"""A validated request, and what it has produced so far."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field, frozen

from modulm_route_responses.output import Output
from modulm_server.hosted_tools import HostedTools
from modulm_server.sse import event

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from modulm.contracts.outputs import CompletionOutput
    from modulm_route_responses.conversations import Conversation
    from modulm_route_responses.objects import RawMessage, ResponseObject, Usage
    from modulm_route_responses.schema import ResponsesRequest
    from modulm_route_responses.store import Stored
    from modulm_server.chat_turn import ChatTurn
    from modulm_server.errors import ApiError
    from modulm_server.generation import ServedModel
    from modulm_server.prompts import Prompt

__all__ = ["Job", "RawMessages", "calls_made", "end_early", "stays_with_server"]


@define
class RawMessages:
    """What the model read and wrote, for `enable_response_messages`.

    output: a message per turn; between turns, the whole next prompt, as in vLLM. text, tokens: of
    the turn that runs.
    """

    input: list[RawMessage]
    output: list[RawMessage] = field(factory=list)
    text: list[str] = field(factory=list)
    tokens: list[int] = field(factory=list)

    @classmethod
    def of(cls, prompt: Prompt) -> RawMessages:
        """Start with the prompt of the first turn."""
        return cls([_raw(prompt.text or "", prompt.ids)])

    def add_prompt(self, prompt: Prompt) -> None:
        """Add the prompt of a later turn."""
        self.output.append(_raw(prompt.text or "", prompt.ids))

    def add_output(self, choice: CompletionOutput) -> None:
        """Add new text and tokens of the turn."""
        self.text.append(choice.text)
        self.tokens += choice.token_ids

    def end_turn(self) -> None:
        """Complete the message of the turn."""
        self.output.append(_raw("".join(self.text), self.tokens))
        self.text.clear()
        self.tokens = []


def _raw(text: str, tokens: Sequence[int]) -> RawMessage:
    return {"type": "raw_message_tokens", "message": text, "tokens": list(tokens)}


@frozen
class Job:
    """A validated request. `stored.body` is the response so far. pieces: the engine's outputs are
    deltas. request_items: the input items of this request. hosted: the tools that the server runs;
    request, model: for the prompts after their calls. usages: of the turns so far. raw: if
    requested.
    """

    turn: ChatTurn
    stored: Stored
    output: Output = field(factory=Output)
    keep: bool = True
    pieces: bool = False
    conversation: Conversation | None = None
    hosted: HostedTools = field(factory=HostedTools)
    request: ResponsesRequest | None = None
    model: ServedModel | None = None
    usages: list[Usage] = field(factory=list)
    request_items: Sequence[dict[str, Any]] = ()
    raw: RawMessages | None = None
    numbers: Iterator[int] = field(factory=count)

    @property
    def body(self) -> ResponseObject:
        return self.stored.body

    def frame(self, value: dict[str, Any]) -> bytes:
        """Encode an event with its sequence number."""
        return event(value["type"], {**value, "sequence_number": next(self.numbers)})

    def state(self, name: str) -> bytes:
        """Encode an event with the whole response so far."""
        return self.frame({"type": f"response.{name}", "response": self.body})

    def failed(self, api_error: ApiError) -> bytes:
        """Encode the error event at the end of a failed stream."""
        error = {"code": api_error.code, "message": api_error.message, "param": api_error.param}
        return self.frame({"type": "error", **error})


def calls_made(job: Job) -> int:
    """The number of calls of tool servers that this response has made."""
    ended = ("completed", "failed")
    items = job.output.items
    return sum(item["type"] == "mcp_call" and item["status"] in ended for item in items)


def stays_with_server(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model called tools of the server, and nothing that the client must answer."""
    kinds = {item["type"] for item in items}
    return "mcp_call" in kinds and not kinds & {"function_call", "mcp_approval_request"}


def end_early(job: Job, status: Literal["cancelled", "failed"]) -> None:
    """End an incomplete response, with its output so far."""
    for _ in job.output.close("incomplete"):
        pass
    job.body["output"] = job.output.items
    job.body["status"] = status
    if job.stored.log is not None:
        job.stored.log.add(job.state(status))
