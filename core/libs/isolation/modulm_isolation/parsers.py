"""Parsers in another process: the stand-in here, and the class that serves it there.

A stand-in remembers the text that it was fed. If the process has ended meanwhile, for example by
another message, the parser is made again and fed the same pieces, so that its message goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import finalize

from attrs import fields

from modulm.contracts import parser as contract
from modulm.contracts.parser import Example, ParseContext, Parser, ReasoningParser, ToolParser
from modulm.contracts.tokenizer import Codec, Tokenizer
from modulm.errors import PluginBroken
from modulm_isolation.child import Questions, resolve
from modulm_isolation.process import IsolatedDriver, driver_of

if TYPE_CHECKING:
    from modulm.contracts.parser import Event
    from modulm.plugins.declaration import Declaration

__all__ = ["ParserServer", "stand_in"]

_EVENTS = {
    cls.__name__: cls
    for cls in (
        contract.Content,
        contract.Reasoning,
        contract.ToolStart,
        contract.ToolArguments,
        contract.ToolEnd,
    )
}
#: What of a tokenizer a parser may ask for.
_CODEC = ("encode", "fit", "decode", "token", "index", "size", "special_ids", "added")
_numbers = count()


def _pack_events(events: Sequence[Event]) -> list[list[Any]]:
    return [
        [type(event).__name__, *(getattr(event, f.name) for f in fields(type(event)))]
        for event in events
    ]


def _unpack_events(packed: Sequence[Sequence[Any]]) -> list[Event]:
    return [_EVENTS[name](*values) for name, *values in packed]


def _pack_context(context: ParseContext) -> dict[str, Any]:
    table = {f.name: getattr(context, f.name) for f in fields(ParseContext)}
    tokenizer = table.pop("tokenizer")
    if tokenizer is not None:
        table["tokenizer"] = {
            "special": dict(tokenizer.special),
            "stop_ids": tokenizer.stop_ids,
            "chat_template": tokenizer.chat_template,
            "name": tokenizer.name,
            "response_template": tokenizer.response_template,
            "spelling": tokenizer.spelling,
        }
    return table


def _answers(context: ParseContext) -> Any:
    """Answer questions about the context's tokenizer."""

    def answer(method: str, arguments: Sequence[Any]) -> Any:
        if method not in _CODEC or context.tokenizer is None:
            raise PluginBroken(f"{method} is no method of tokenizers")
        value = getattr(context.tokenizer._codec, method)(*arguments)
        if isinstance(value, frozenset):
            return sorted(value)
        return dict(value) if isinstance(value, Mapping) else value

    return answer


class _Isolated(Parser):
    """What the stand-ins of both kinds share. `remote` and `facts` are set by `stand_in`."""

    remote: IsolatedDriver
    facts: Mapping[str, Any]

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        self._fed: list[tuple[str, list[int]]] = []
        self._number = next(_numbers)
        self._answers = _answers(context)
        self._open()
        finalize(self, self.remote.process.forget, self._number)

    def _open(self) -> None:
        self._follow(self._call("open", _pack_context(self.context), self._fed))
        self._generation = self.remote.process.generation

    def _call(self, method: str, *arguments: Any) -> Any:
        return self.remote.call(method, self._number, *arguments, answers=self._answers)

    def _follow(self, state: Sequence[Any]) -> None:
        self.special_tokens, self._inside, self._end = tuple(state[0]), state[1], state[2]

    def _current(self, method: str, *arguments: Any) -> Any:
        """Call a method of the parser; it is made again first if the process has ended."""
        process = self.remote.process
        if process.pid is None or process.generation != self._generation:
            self._open()
        return self._call(method, *arguments)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Consume text and return the events that are certain."""
        piece = text, list(map(int, ids))
        events, state = self._current("feed", *piece)
        self._fed.append(piece)
        self._follow(state)
        return _unpack_events(events)

    def finish(self) -> list[Event]:
        """End the text and return the events held back so far."""
        events, state = self._current("finish")
        self._follow(state)
        return _unpack_events(events)


class _IsolatedToolParser(_Isolated, ToolParser):
    def structural_tag(self) -> Mapping[str, object] | None:
        if not self.facts["tags"]:
            return None
        tag: Mapping[str, object] | None = self._current("structural_tag")
        return tag


class _IsolatedReasoningParser(_Isolated, ReasoningParser):
    @property
    def reasoning(self) -> bool:
        inside: bool = self._inside
        return inside

    @property
    def reasoning_end(self) -> str | None:
        end: str | None = self._end
        return end


def stand_in(declaration: Declaration, term: str) -> type[Parser]:
    """Return the class that stands for a parser. Raises PluginBroken if it cannot be imported."""
    remote = driver_of(declaration, term, "modulm_isolation.parsers:ParserServer")
    facts = remote.call("describe")
    tools = declaration.kind == "tool_parsers"
    base = _IsolatedToolParser if tools else _IsolatedReasoningParser
    api = facts["api"]
    members: dict[str, Any] = {
        "remote": remote,
        "facts": facts,
        "name": facts["name"],
        "api": tuple(api) if isinstance(api, list) else api,
        "special_tokens": tuple(facts["special_tokens"]),
        "examples": tuple(map(_unpack_example, facts["examples"])),
    }
    if not tools:
        members["tells_end"] = facts["tells_end"]
        switches = facts["template_switches"].items()
        members["template_switches"] = {name: tuple(pair) for name, pair in switches}
        members["template_efforts"] = facts["template_efforts"]
    return type(facts["class"], (base,), members)


def _unpack_example(table: Mapping[str, Any]) -> Example:
    calls = tuple((name, arguments) for name, arguments in table["calls"])
    context = ParseContext(**{**table["context"], "tools": tuple(table["context"]["tools"])})
    return Example(**{**table, "calls": calls, "context": context})


class _AskedCodec(Codec):
    """A tokenizer's operations, asked of the process that has it."""

    def __init__(self, questions: Questions, spelling: Any) -> None:
        self._questions = questions
        self.spelling = spelling

    def encode(self, text: str, special: bool) -> Any:
        return self._questions.ask("encode", text, special)

    def fit(self, texts: Sequence[str], special: bool, limit: int | None, side: str) -> Any:
        return tuple(self._questions.ask("fit", list(texts), special, limit, side))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> Any:
        return self._questions.ask("decode", list(ids), skip_special_tokens)

    def token(self, index: int) -> Any:
        return self._questions.ask("token", index)

    def index(self, token: str) -> Any:
        return self._questions.ask("index", token)

    def size(self) -> Any:
        return self._questions.ask("size")

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._questions.ask("special_ids"))

    def added(self) -> Any:
        return self._questions.ask("added")


def _no_backend() -> Any:
    raise PluginBroken("an isolated parser has no transformers tokenizer")


class ParserServer:
    """Serves parsers, by number, in the isolated process."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._parsers: dict[int, Parser] = {}

    def describe(self, target: str) -> dict[str, Any]:
        """What the class says of itself."""
        cls: Any = resolve(target)
        names = ("tells_end", "template_switches", "template_efforts")
        facts = {name: getattr(cls, name) for name in names if hasattr(cls, name)}
        facts |= {
            "class": cls.__name__,
            "name": getattr(cls, "name", cls.__name__),
            "api": getattr(cls, "api", None),
            "special_tokens": list(cls.special_tokens),
            "examples": [_pack_example(example) for example in cls.examples],
            "tags": getattr(cls, "structural_tag", None) is not ToolParser.structural_tag,
        }
        return facts

    def open(self, target: str, number: int, context: dict[str, Any], fed: Any) -> list[Any]:
        """Make a parser, and feed it what it had been fed before; return its state."""
        settings = context.pop("tokenizer", None)
        if settings is not None:
            codec = _AskedCodec(self._questions, settings.pop("spelling"))
            settings["stop_ids"] = tuple(settings["stop_ids"])
            context["tokenizer"] = Tokenizer(codec=codec, open=_no_backend, **settings)
        context["tools"] = tuple(context["tools"])
        parser = resolve(target)(ParseContext(**context))
        for text, ids in fed:
            parser.feed(text, ids)
        self._parsers[number] = parser
        return _state(parser)

    def feed(self, target: str, number: int, text: str, ids: list[int]) -> list[Any]:
        """Return events and state."""
        parser = self._parsers[number]
        return [_pack_events(parser.feed(text, ids)), _state(parser)]

    def finish(self, target: str, number: int) -> list[Any]:
        """Return events and state."""
        parser = self._parsers[number]
        return [_pack_events(parser.finish()), _state(parser)]

    def structural_tag(self, target: str, number: int) -> Any:
        """Return the parser's structural tag."""
        parser = self._parsers[number]
        return parser.structural_tag() if isinstance(parser, ToolParser) else None

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop parsers whose stand-ins are gone."""
        for number in numbers:
            self._parsers.pop(number, None)


def _state(parser: Parser) -> list[Any]:
    """Return special tokens, whether it is inside of reasoning, and what ends that."""
    inside, end = False, None
    if isinstance(parser, ReasoningParser):
        inside, end = bool(parser.reasoning), parser.reasoning_end
    return [list(parser.special_tokens), inside, end]


def _pack_example(example: Example) -> dict[str, Any]:
    table = {f.name: getattr(example, f.name) for f in fields(Example)}
    table["context"] = {
        f.name: getattr(example.context, f.name)
        for f in fields(ParseContext)
        if f.name != "tokenizer"
    }
    return table
