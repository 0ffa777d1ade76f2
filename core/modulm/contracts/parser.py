"""Tool and reasoning parsers (groups `modulm.tool_parsers`, `modulm.reasoning_parsers`).

Parsers are incremental: they are fed text as it is generated and return events. A complete text
takes the same path. A parser must run in linear time, produce the same merged events however the
text is split, leave quoted markers alone, emit a partial marker at the end as text, and never
report a truncated call as complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm.contracts.tokenizer import Tokenizer

__all__ = [
    "API",
    "Content",
    "Event",
    "Example",
    "ParseContext",
    "Parser",
    "Reasoning",
    "ReasoningParser",
    "ToolArguments",
    "ToolEnd",
    "ToolParser",
    "ToolStart",
]

API = 1


@frozen
class Content:
    """Text of the answer."""

    text: str


@frozen
class Reasoning:
    """Text of the model's reasoning, without its markers."""

    text: str


@frozen
class ToolStart:
    """The start of a tool call. `index` counts the calls of the message from 0.

    `id` is set only if the model's format has call ids; otherwise the server creates one.
    """

    index: int
    name: str
    id: str | None = None


@frozen
class ToolArguments:
    """A piece of a call's arguments; the deltas of one call concatenate to one JSON object."""

    index: int
    delta: str


@frozen
class ToolEnd:
    """The end of a complete tool call. Truncated calls never get this event."""

    index: int


Event = Content | Reasoning | ToolStart | ToolArguments | ToolEnd


@frozen
class ParseContext:
    """What a parser knows before the first token.

    tools: the request's tools in OpenAI's form. prompt_tail: end of the rendered prompt (a template
    may already have opened a think block), or None. template_kwargs: chat_template_kwargs.
    tokenizer: None if only text is available. max_calls: maximum number of calls, None: no limit.
    grammar_enforced: a grammar constrains the calls, so markers may be spelled with any tokens.
    """

    tools: Sequence[Mapping[str, object]] = ()
    tool_choice: str | Mapping[str, object] = "auto"
    template_kwargs: Mapping[str, object] = field(factory=dict)
    prompt_tail: str | None = None
    tokenizer: Tokenizer | None = None
    max_calls: int | None = None
    grammar_enforced: bool = False
    #: The former name of `grammar_enforced`.
    held = property(lambda self: self.grammar_enforced)


@frozen
class Example:
    """A model output and its expected parse; the contract kit runs all examples of a parser.

    calls: (name, parsed arguments) of the complete calls, in order.
    """

    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, Mapping[str, object]], ...] = ()
    context: ParseContext = field(factory=ParseContext)


class Parser(ABC):
    """An incremental parser of one message."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Special tokens that the format uses; the detokenizer must keep them. Which markers are
    #: special may depend on the tokenizer, so instances may set this.
    special_tokens: tuple[str, ...] = ()
    #: Typical model outputs, at least one; also run by `modulm plugins doctor`.
    examples: ClassVar[tuple[Example, ...]]

    def __init__(self, context: ParseContext) -> None:
        self.context = context

    @abstractmethod
    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Consume text (and its token ids, if known) and return the events that are certain."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """End the text and return the events held back so far."""


class ToolParser(Parser):
    """Turns text into content and tool-call events."""

    def structural_tag(self) -> Mapping[str, object] | None:
        """Return a structural tag that constrains output to calls in this format, or None.

        With tool choice "auto", text may precede the calls. Raises RequestError for tool parameters
        that cannot be constrained in this format.
        """
        return None


class ReasoningParser(Parser):
    """Splits text into `Reasoning` and `Content`; the content goes on to the tool parser."""

    #: Whether `reasoning_end` is implemented, which thinking budgets need.
    tells_end: ClassVar[bool] = False
    #: Chat template variable -> its values with thinking off and on; None: not passed.
    template_switches: ClassVar[Mapping[str, tuple[object, object]]] = {
        "enable_thinking": (False, True),
        "thinking": (False, True),
    }
    #: Effort ("none" to "max") -> its name in the chat templates, if different; "": not passed.
    template_efforts: ClassVar[Mapping[str, str]] = {}

    @property
    @abstractmethod
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning. Grammars start after it."""

    @property
    def reasoning_end(self) -> str | None:
        """The text that ends the current reasoning block.

        None outside of reasoning, and while the last characters may belong to a marker.
        """
        return None
