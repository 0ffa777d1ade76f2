"""Chats whose tools the server runs: after its calls the model goes on, in a further turn.

Calls travel in `mcp_calls` of an assistant message: a client that sends the message back gives the
model their results again. See docs/tool-servers.md.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypedDict

from attrs import define, evolve, field, frozen

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolStart
from modulm_parsing import assemble, new_call_id
from modulm_server.chat_turn import Message
from modulm_server.hosted_tools import DECLINED
from modulm_server.json_body import bad_field
from modulm_server.tool_servers import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from modulm.contracts.outputs import RequestOutput
    from modulm.contracts.parser import Event
    from modulm_server.chat_turn import ChatTurn, Delta, RunningTurn
    from modulm_server.hosted_tools import HostedTools

__all__ = ["TOO_MANY_CALLS", "HostedCall", "HostedTurns", "Step", "with_hosted_calls"]

#: The `stop_reason` of an answer that ended with more calls than --tool-calls.
TOO_MANY_CALLS = "max_tool_calls"


class HostedCall(TypedDict):
    """A call that the server made. error: why there is no output."""

    id: str
    server_label: str
    name: str
    arguments: str
    output: str | None
    error: str | None


@frozen(kw_only=True)
class Step:
    """What happened in an answer: a delta of the model, or a call of the server."""

    output: RequestOutput
    delta: Delta | None = None
    call: HostedCall | None = None


@define(eq=False)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(factory=list)


@define(eq=False)
class HostedTurns:
    """An answer of one choice, with the server's calls.

    first: its first turn. limit: of calls. next_turn: renders the turn after further messages.
    single: the model may make one call per turn. The counts are of all turns so far;
    turn_generated: tokens of the last one.
    """

    first: RunningTurn
    hosted: HostedTools
    limit: int
    next_turn: Callable[[list[dict[str, Any]]], Awaitable[ChatTurn]]
    single: bool = False
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    generated: int = field(default=0, init=False)
    turn_generated: int = field(default=0, init=False)
    thinking_tokens: int | None = field(default=None, init=False)
    _calls_made: int = field(default=0, init=False)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Run the answer. Only the last delta has a finish reason."""
        running, messages = self.first, list[dict[str, Any]]()
        while True:
            counts = self.prompt_tokens, self.cached_tokens, self.generated
            split = _Split(self.hosted, self.single)
            last: Delta | None = None
            async with aclosing(running.running) as outputs:
                async for output in outputs:
                    self.prompt_tokens = counts[0] + len(output.prompt_token_ids)
                    self.cached_tokens = counts[1] + (output.num_cached_tokens or 0)
                    for delta in running.deltas(output):
                        self.generated = counts[2] + delta.generated
                        self.turn_generated = delta.generated
                        new = evolve(
                            delta, events=split.read(delta.events), generated=self.generated
                        )
                        if delta.finish_reason is not None:
                            last = new
                            new = evolve(new, finish_reason=None)
                        yield Step(output=output, delta=new)
            thought = await running.reasoning_tokens()
            if thought is not None:
                self.thinking_tokens = (self.thinking_tokens or 0) + thought
            if last is None:
                return
            last = evolve(last, events=(), token_ids=(), logprobs=None)
            if last.finish_reason != "stop" or not split.calls:
                yield Step(output=output, delta=last)
                return
            made = []
            for call in split.calls.values():
                made.append(await self._make(call))
                yield Step(output=output, call=made[-1])
            if split.leaves_calls:
                yield Step(output=output, delta=last)
                return
            if self._calls_made >= self.limit:
                ended = evolve(last, finish_reason="length", stop_reason=TOO_MANY_CALLS)
                yield Step(output=output, delta=ended)
                return
            messages += _turn_messages(self.hosted, split.text, split.thoughts, made)
            running = await (await self.next_turn(messages)).start()

    async def message(self) -> tuple[RequestOutput, Message, list[HostedCall]]:
        """Run the answer; returns (the engine's last output, the message, the server's calls)."""
        events: list[Event] = []
        ids: list[int] = []
        positions: list[Any] | None = None
        calls: list[HostedCall] = []
        last: Delta | None = None
        async with aclosing(self.steps()) as steps:
            async for step in steps:
                output = step.output
                if step.call is not None:
                    calls.append(step.call)
                if step.delta is not None:
                    last = step.delta
                    events += last.events
                    ids += last.token_ids
                    if last.logprobs is not None:
                        positions = [*(positions or ()), *last.logprobs]
        message = Message(
            index=0,
            parsed=assemble(events),
            generated=self.generated,
            token_ids=ids,
            logprobs=positions,
            finish_reason=(last.finish_reason if last else None) or "stop",
            stop_reason=last.stop_reason if last else None,
        )
        return output, message, calls

    async def _make(self, call: _Call) -> HostedCall:
        tool = self.hosted.by_name[call.name]
        arguments = "".join(call.arguments)
        outcome = Outcome(None, "too many tool calls")
        if self._calls_made < self.limit:
            self._calls_made += 1
            outcome = await tool.call(arguments)
        return {
            "id": call.id, "server_label": tool.label, "name": tool.name, "arguments": arguments,
            "output": outcome.output, "error": outcome.error,
        }  # fmt: skip


class _Split:
    """Takes the server's calls out of the events of a turn.

    calls: the server's, by the parser's index. leaves_calls: the client must answer some.
    """

    def __init__(self, hosted: HostedTools, single: bool) -> None:
        self._hosted = hosted
        self._single = single
        self._shown: dict[int, int] = {}
        self.calls: dict[int, _Call] = {}
        self.text = ""
        self.thoughts = ""

    @property
    def leaves_calls(self) -> bool:
        return bool(self._shown)

    def read(self, events: Sequence[Event]) -> list[Event]:
        """Return the events that are left, with the client's calls counted from 0."""
        return [left for event in events if (left := self._read(event)) is not None]

    def _read(self, event: Event) -> Event | None:
        if isinstance(event, Content):
            self.text += event.text
            return event
        if isinstance(event, Reasoning):
            self.thoughts += event.text
            return event
        index = event.index
        if isinstance(event, ToolStart) and not (self._single and index):
            tool = self._hosted.by_name.get(event.name)
            if tool is not None and not tool.approval:
                self.calls[index] = _Call(event.id or new_call_id(), event.name)
            else:
                self._shown[index] = len(self._shown)
        if isinstance(event, ToolArguments) and index in self.calls:
            self.calls[index].arguments.append(event.delta)
        return evolve(event, index=self._shown[index]) if index in self._shown else None


def _turn_messages(
    hosted: HostedTools, text: str, thoughts: str, calls: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """An assistant message with calls, and their results."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    message["tool_calls"] = [
        {
            "id": call["id"], "type": "function",
            "function": {
                "name": hosted.model_name(call["server_label"], call["name"]),
                "arguments": call["arguments"],
            },
        }
        for call in calls
    ]  # fmt: skip
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": _result(call)} for call in calls
    ]
    return [message, *results]


def _result(call: Mapping[str, Any]) -> str:
    output, error = call.get("output"), call.get("error")
    return str(output if output is not None else error or "no result")


async def with_hosted_calls(
    messages: Sequence[Mapping[str, Any]], hosted: HostedTools, *, runs: bool = True
) -> tuple[list[dict[str, Any]], list[HostedCall]]:
    """Replace `mcp_calls` by messages with calls and results, and `approve` by a result.

    Calls that the client approves in the last messages are made, if it `runs`, and returned.
    Raises ApiError(400).
    """
    if not any("mcp_calls" in message or "approve" in message for message in messages):
        return [dict(message) for message in messages], []
    known = _recorded(messages)
    lists = [message.get("tool_calls") for message in messages]
    calls = [call for each in lists if isinstance(each, list) for call in each]
    requests = {str(call.get("id")): call for call in calls if isinstance(call, dict)}
    last = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
    expanded: list[dict[str, Any]] = []
    made: list[HostedCall] = []
    for index, message in enumerate(messages):
        rest = {k: v for k, v in message.items() if k not in ("mcp_calls", "approve")}
        if message.get("role") == "assistant":
            # Calls that the client approved have their own message and result already.
            earlier = [c for c in message.get("mcp_calls") or () if c["id"] not in requests]
            if earlier:
                expanded += _turn_messages(hosted, "", "", earlier)
        elif "approve" in message:
            call_id = str(message.get("tool_call_id"))
            where = f"messages[{index}]"
            if message.get("role") != "tool" or not isinstance(message["approve"], bool):
                raise bad_field("messages", f"{where}.approve must be true or false, of role tool")
            if not message["approve"]:
                rest["content"] = DECLINED
            elif call_id in known:
                rest["content"] = _result(known[call_id])
            elif index < last:
                raise bad_field(
                    "messages", f"{where}.approve: no later message has this call in mcp_calls"
                )
            else:
                made.append(await _approved(where, requests.get(call_id), hosted, runs))
                rest["content"] = _result(made[-1])
        expanded.append(rest)
    return expanded, made


def _recorded(messages: Sequence[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """The calls in `mcp_calls`, by id. Raises ApiError(400)."""
    known: dict[Any, Mapping[str, Any]] = {}
    for index, message in enumerate(messages):
        calls = message.get("mcp_calls") or ()
        where = f"messages[{index}].mcp_calls"
        if not isinstance(calls, list | tuple):
            raise bad_field("messages", f"{where} must be a list")
        for call in calls:
            names = ("id", "server_label", "name", "arguments")
            if not isinstance(call, dict) or any(not isinstance(call.get(n), str) for n in names):
                raise bad_field("messages", f"{where}: a call needs {', '.join(names)}")
            known[call["id"]] = call
    return known


async def _approved(where: str, request: Any, hosted: HostedTools, runs: bool) -> HostedCall:
    """Make a call that the client approves."""
    function = request.get("function") if isinstance(request, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    tool = hosted.by_name.get(name) if isinstance(name, str) else None
    if tool is None or not isinstance(function, dict):
        raise bad_field(
            "messages", f"{where}.approve: tool_call_id is no call of a tool server of this request"
        )
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise bad_field("messages", f"{where}.approve: the call's arguments must be a string")
    outcome = await tool.call(arguments) if runs else Outcome(None, "not run")
    return {
        "id": str(request["id"]), "server_label": tool.label, "name": tool.name,
        "arguments": arguments, "output": outcome.output, "error": outcome.error,
    }  # fmt: skip
