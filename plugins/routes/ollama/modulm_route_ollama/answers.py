"""Response parts in Ollama's form, whole or streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from attrs import define, field

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolEnd, ToolStart
from modulm_parsing import parse_arguments

if TYPE_CHECKING:
    from modulm.contracts.outputs import Position
    from modulm.contracts.parser import Event
    from modulm_route_ollama.objects import Answer, Logprob, TokenLogprob, ToolCall

__all__ = ["Clock", "Pieces", "call_of", "line", "logprobs_of", "now", "reason_of"]


def now() -> str:
    """The current time in UTC, in the format of `created_at`."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@define
class Clock:
    """Times of a request and of its first token, in monotonic seconds."""

    started: float = field(factory=time.monotonic)
    first: float | None = None

    def token(self, generated: float | None = None) -> None:
        """Record the first token. generated: when the engine returned it; otherwise it is now."""
        if self.first is None:
            self.first = time.monotonic() if generated is None else generated

    def figures(self, prompt: int, generated: int) -> dict[str, Any]:
        """The statistics of a response's last line. Load time is 0."""
        end = time.monotonic()
        first = end if self.first is None else self.first
        return {
            "total_duration": round((end - self.started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": round((first - self.started) * 1e9),
            "eval_count": generated,
            "eval_duration": round((end - first) * 1e9),
        }


@define
class Pieces:
    """Converts parser events to message parts. Calls are sent when complete."""

    _names: dict[int, str] = field(factory=dict)
    _arguments: dict[int, list[str]] = field(factory=dict)

    def convert(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Yield texts, thoughts and calls in order."""
        for event in events:
            match event:
                case Content("") | Reasoning(""):
                    continue
                case Content(text):
                    yield {"content": text}
                case Reasoning(text):
                    yield {"content": "", "thinking": text}
                case ToolStart(index, name, _):
                    self._names[index], self._arguments[index] = name, []
                case ToolArguments(index, text):
                    self._arguments[index].append(text)
                case ToolEnd(index):
                    call = call_of(self._names[index], "".join(self._arguments[index]))
                    yield {"content": "", "tool_calls": [call]}


def call_of(name: str, arguments: str) -> ToolCall:
    """Build a tool call; invalid or incomplete arguments become {}."""
    return {"function": {"name": name, "arguments": parse_arguments(arguments)}}


def reason_of(reason: str | None) -> str:
    """`done_reason`."""
    return "length" if reason == "length" else "stop"


def logprobs_of(positions: Sequence[Position] | None) -> list[Logprob]:
    """Build one entry per token, with its top candidates."""
    entries: list[Logprob] = []
    for position in positions or ():
        chosen, *others = [_entry(one) for one in position.values()]
        entries.append({**chosen, "top_logprobs": others})
    return entries


def _entry(one: Any) -> TokenLogprob:
    return {"token": one.decoded_token or "", "logprob": one.logprob}


def line(value: Mapping[str, Any] | Answer) -> bytes:
    """One line of a stream."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
