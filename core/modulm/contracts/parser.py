"""Tool and reasoning parsers (groups `modulm.tool_parsers`, `modulm.reasoning_parsers`).

A parser is one incremental core: it is fed text as it comes and answers with events; feeding a
whole text at once is the same path. It must take linear time, give the same merged events for
every way of cutting the text, leave quoted markers alone, flush a partial marker at the end as
the text it is, and never present a call that was cut off as complete.
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
    """Text for the user."""

    text: str


@frozen
class Reasoning:
    """Text of the model's reasoning, without its markers."""

    text: str


@frozen
class ToolStart:
    """A tool call begins; `index` counts the calls of the message from 0.

    `id` is set only where the wire format carries an identifier; else the server makes one.
    """

    index: int
    name: str
    id: str | None = None


@frozen
class ToolArguments:
    """More of a call's arguments; the deltas of one call concatenate to one JSON object."""

    index: int
    delta: str


@frozen
class ToolEnd:
    """A tool call is complete: its arguments are whole. A cut call never gets this event."""

    index: int


Event = Content | Reasoning | ToolStart | ToolArguments | ToolEnd


@frozen
class ParseContext:
    """What a parser may know before the first token.

    tools: the request's tools in OpenAI's form. prompt_tail: the end of the rendered prompt (a
    template may already have opened a think block), None when the prompt is not known.
    template_kwargs: chat_template_kwargs.
    tokenizer: the tokenizer, or None when only text is at hand. max_calls: most calls that the
    message may have, None for no bound. held: whether a grammar writes the calls; it may spell
    markers with any tokens.
    """

    tools: Sequence[Mapping[str, object]] = ()
    tool_choice: str | Mapping[str, object] = "auto"
    template_kwargs: Mapping[str, object] = field(factory=dict)
    prompt_tail: str | None = None
    tokenizer: Tokenizer | None = None
    max_calls: int | None = None
    held: bool = False


@frozen
class Example:
    """One output of a model and what it means: the contract kit runs every example of a parser.

    calls: (name, arguments as a value) of the complete calls, in order.
    """

    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, Mapping[str, object]], ...] = ()
    context: ParseContext = field(factory=ParseContext)


class Parser(ABC):
    """An incremental parser of one message; made anew for every message."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Special tokens that the wire format is made of: the detokenizer must not drop them. A parser
    #: may know only with its tokenizer which of its markers are special.
    special_tokens: tuple[str, ...] = ()
    #: Outputs as the models write them, at least one; `modulm plugins doctor` runs them too.
    examples: ClassVar[tuple[Example, ...]]

    def __init__(self, context: ParseContext) -> None:
        self.context = context

    @abstractmethod
    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Take more text (and, where known, the token ids it came from); give what is certain."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The text has ended: give what was held back."""


class ToolParser(Parser):
    """Turns text into content and tool-call events."""

    def structural_tag(self) -> Mapping[str, object] | None:
        """What holds the answer to calls as the context wants them, in this format, if known.

        A structural tag as grammar backends read them. With a tool choice of "auto" text may come
        before calls. Raises RequestError for parameters that the format cannot be held to.
        """
        return None


class ReasoningParser(Parser):
    """Splits text into `Reasoning` and `Content`; the content goes on to the tool parser."""

    #: Whether `reasoning_end` is known; the models of others have no thinking budget.
    tells_end: ClassVar[bool] = False
    #: Variable of the models' chat templates -> what it is with thinking off, and on; None: not
    #: handed over.
    template_switches: ClassVar[Mapping[str, tuple[object, object]]] = {
        "enable_thinking": (False, True),
        "thinking": (False, True),
    }
    #: Effort ("none" to "max") -> what the templates call it where that is another name; "": not
    #: handed over.
    template_efforts: ClassVar[Mapping[str, str]] = {}

    @property
    @abstractmethod
    def reasoning(self) -> bool:
        """Whether the text fed so far ends inside the reasoning (a grammar waits for its end)."""

    @property
    def reasoning_end(self) -> str | None:
        """What the model would write to end the thought that the text so far is in.

        None outside of one, and while it is open whether what was read last belongs to it.
        """
        return None
