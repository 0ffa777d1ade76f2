"""Parse one message of a model into content, reasoning and tool calls."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypedDict
from uuid import uuid4

from attrs import evolve, frozen

from modulm.contracts.parser import (
    Content,
    Event,
    ParseContext,
    Reasoning,
    ReasoningParser,
    ToolArguments,
    ToolEnd,
    ToolParser,
    ToolStart,
)
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm_parsing.forced import NamedCall, RequiredCalls
from modulm_parsing.reading import MessageReader, ReasoningFormat, ToolFormat
from modulm_tokenizers.tokenizer import wrap_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from modulm.plugins.manager import PluginManager

__all__ = [
    "MessageParser",
    "OpenAICall",
    "OpenAIFunction",
    "ParsedMessage",
    "ToolCall",
    "assemble",
    "merge",
    "message_parser",
    "new_call_id",
    "parse",
    "parse_arguments",
]

#: Number of characters at the prompt's end that parsers get.
PROMPT_TAIL = 512


class OpenAIFunction(TypedDict):
    """A function call, with its arguments as JSON text."""

    name: str
    arguments: str


class OpenAICall(TypedDict):
    """A tool call in the form of OpenAI's chat API."""

    id: str
    type: Literal["function"]
    function: OpenAIFunction


@frozen
class ToolCall:
    """A tool call. `arguments` is JSON text; not `complete` if the output was cut off inside it."""

    index: int
    id: str
    name: str
    arguments: str
    complete: bool

    def as_openai(self) -> OpenAICall:
        """The call in the form of OpenAI's chat API."""
        function: OpenAIFunction = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@frozen
class ParsedMessage:
    """A complete message. `content` and `reasoning` are None if absent.

    `deltas` are the events in the order in which they became certain, as streamed.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    deltas: tuple[Event, ...]


class MessageParser:
    """The reasoning parser and the tool parser of one message.

    Formats are read as one grammar; other parsers run one after the other.
    """

    def __init__(self, tools: ToolParser | None, reasoning: ReasoningParser | None) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._reader = _one_reader(tools, reasoning)
        if self._reader is not None:
            self.feed = self._reader.feed  # type: ignore[method-assign]
            self.finish = self._reader.finish  # type: ignore[method-assign]

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        if self._reader is not None:
            return self._reader.thinking
        return self._reasoning is not None and self._reasoning.reasoning

    @property
    def reasoning_end(self) -> str | None:
        """Text that would end the current thought; None outside of one."""
        if self._reader is not None:
            return self._reader.reasoning_end
        return None if self._reasoning is None else self._reasoning.reasoning_end

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens that the detokenizer must keep."""
        both = (self._reasoning, self._tools)
        return tuple(t for parser in both if parser is not None for t in parser.special_tokens)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Parse more text and its token ids; return the events that are certain."""
        if self._reasoning is None:
            return self._content(text, ids)
        return self._onward(self._reasoning.feed(text, ids), ids)

    def finish(self) -> list[Event]:
        """End of the text; return the remaining events."""
        events = self._onward(self._reasoning.finish(), ()) if self._reasoning is not None else []
        if self._tools is not None:
            events += self._tools.finish()
        return events

    def _onward(self, events: list[Event], ids: Sequence[int]) -> list[Event]:
        """Pass content on to the tool parser, with the ids if all of the text is content."""
        onward: list[Event] = []
        whole = len(events) == 1
        for event in events:
            if isinstance(event, Content):
                onward += self._content(event.text, ids if whole else ())
            else:
                onward.append(event)
        return onward

    def _content(self, text: str, ids: Sequence[int]) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._tools.feed(text, ids)


def _one_reader(
    tools: ToolParser | None, reasoning: ReasoningParser | None
) -> MessageReader | None:
    """Return one reader for both formats, if they can share it."""
    if not isinstance(reasoning, ReasoningFormat):
        tools_only = reasoning is None and isinstance(tools, ToolFormat)
        return tools.alone() if tools_only and isinstance(tools, ToolFormat) else None
    if tools is None:
        return reasoning.alone()
    if not isinstance(tools, ToolFormat) or tools.reader is not reasoning.reader:
        return None
    return tools.reader(tools.context, tools, reasoning)


def message_parser(
    context: ParseContext, tool_parser: str | None, reasoning_parser: str | None
) -> MessageParser:
    """Create the parsers by name for one message.

    A forced tool choice is parsed in the model's own format if a grammar enforces that, otherwise
    as the JSON that its grammar produces. Raises PluginNotFound.
    """
    plugins = manager.current()
    reasoning = None
    if reasoning_parser:
        reasoning = plugins.load("reasoning_parsers", reasoning_parser)(context)
    return MessageParser(_tool_parser(context, tool_parser, plugins), reasoning)


def _tool_parser(
    context: ParseContext, name: str | None, plugins: PluginManager
) -> ToolParser | None:
    choice = context.tool_choice
    if choice == "none":
        return None
    enforced_format = context.grammar_enforced and bool(name)
    if choice == "required" and not enforced_format:
        return RequiredCalls(context)
    if not isinstance(choice, str) and not enforced_format:
        return NamedCall(context, _function_name(choice))
    if not name:
        return None
    parser: ToolParser = plugins.load("tool_parsers", name)(context)
    return parser


def _function_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError("a named tool choice needs function.name", "tool_choice")
    return name


def parse(
    text: str,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    tokenizer: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    pieces: Iterable[str] | None = None,
    chunks: Iterable[str] | None = None,
) -> ParsedMessage:
    """Parse a model's output as the server does.

    With `pieces`, the streamed text deltas, the parsers are fed piece by piece and `text` is
    ignored (`chunks` is an older name for it). `prompt` is the rendered prompt, whose end tells
    some parsers whether the template has opened the reasoning; None means unknown. An empty list of
    `tools` means that the request has none, so nothing is parsed as a call; None means unknown.
    `tokenizer`: of modulm (`LLM.get_tokenizer()`) or transformers. Raises PluginNotFound for a
    parser that is not installed.
    """
    context = ParseContext(
        tools=tuple(tools or ()),
        tool_choice=tool_choice if tools is None or tools else "none",
        template_kwargs=dict(chat_template_kwargs or {}),
        prompt_tail=None if prompt is None else prompt[-PROMPT_TAIL:],
        tokenizer=None if tokenizer is None else wrap_tokenizer(tokenizer),
    )
    parser = message_parser(context, tool_parser, reasoning_parser)
    deltas: list[Event] = []
    deltas_in = chunks if pieces is None else pieces
    for piece in [text] if deltas_in is None else deltas_in:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    return assemble(deltas)


def assemble(deltas: Sequence[Event]) -> ParsedMessage:
    """Assemble the complete message from a stream of events."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for event in deltas:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolStart(index, name, id_):
                calls[index] = ToolCall(index, id_ or new_call_id(), name, "", complete=False)
                arguments[index] = []
            case ToolArguments(index, delta):
                arguments[index].append(delta)
            case ToolEnd(index):
                calls[index] = evolve(calls[index], complete=True)
    ordered = tuple(
        evolve(calls[index], arguments="".join(arguments[index])) for index in sorted(calls)
    )
    return ParsedMessage(
        "".join(content) or None, "".join(reasoning) or None, ordered, tuple(deltas)
    )


def parse_arguments(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; {} if they are incomplete or no object."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def new_call_id() -> str:
    """Generate an identifier for a call whose format has none."""
    return f"call_{uuid4().hex[:24]}"


def merge(events: Iterable[Event]) -> list[Event]:
    """Join adjacent events of one kind, so that streams divided differently compare equal."""
    merged: list[Event] = []
    for (kind, index), group in groupby(events, _kind):
        several = list(group)
        text = "".join(map(_text, several))
        if kind is ToolArguments:
            merged.append(ToolArguments(index, text))
        elif kind is Content or kind is Reasoning:
            merged.append(Content(text) if kind is Content else Reasoning(text))
        else:
            merged += several
    return merged


def _kind(event: Event) -> tuple[type, int]:
    return type(event), event.index if isinstance(event, ToolArguments) else 0


def _text(event: Event) -> str:
    match event:
        case Content(text) | Reasoning(text) | ToolArguments(_, text):
            return text
    return ""
