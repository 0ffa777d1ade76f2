"""Message formats that the checkpoint itself describes: the `response_template` of its tokenizer.

Source: `transformers.utils.chat_parsing`, whose loader and content parsers are used. A template has
the strings or patterns that open and close the fields `thinking` (or `reasoning_content`),
`content` and `tool_calls`, and the conversion of their text to calls. A field is converted when it
is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import regex
from attrs import frozen

from modulm.contracts.parser import Example, ParseContext
from modulm.errors import UnsupportedError
from modulm_parsing import MessageReader, NotACall, ReasoningFormat, Steps, ToolFormat, loads
from modulm_parsing.examples import thought, weather
from modulm_parsing.reading import allowed_kinds
from modulm_parsing.strict import Layout
from modulm_parsing.thoughts import Pen
from modulm_parsing.typed import Schema, parameters_of, typed

if TYPE_CHECKING:
    from modulm_parsing import Source

__all__ = ["HfReasoningParser", "HfToolParser"]

#: Default template, if there is no tokenizer or it has no template.
USUAL: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
#: Names of the reasoning field.
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
#: Most characters to wait for a pattern that may still match.
_PATIENCE = 4096


@cache
def _loaded(template: str) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(json.loads(template))


class HfReader(MessageReader):
    """Reads the fields of the template. Other text is content, if the template allows it."""

    def body(self) -> Steps[None]:
        self._template = json.dumps(_response_template(self.context))
        template = _loaded(self._template)
        prefix = self._prefix(template)
        if prefix:
            self._quietly(template, prefix)
        else:
            yield from self._regions(template, None)
            return
        yield from self._regions(template, self._open)

    _open: str | None = None
    _template: str

    def _prefix(self, template: Any) -> str:
        """Return the part of this message that the prompt already holds."""
        tail = self.context.prompt_tail
        if tail is None:
            return ""
        ends = [match.end() for match in template.start_anchor_re.finditer(tail)]
        return tail[ends[-1] :] if ends else ""

    def _quietly(self, template: Any, prefix: str) -> None:
        """Find the field that the prompt leaves open, without emitting events."""
        at, inside = 0, None
        while True:
            best = _first(_watch(self._template, inside), prefix, at)
            if best is None:
                break
            name, match = best
            at = match.end()
            inside = name if inside is None else None
        self._open = inside

    def _regions(self, template: Any, inside: str | None) -> Steps[None]:
        while True:
            self.thinking = self.thoughts is not None and inside in _THOUGHTS
            if inside == "tool_calls" and self.tools is not None:
                boundary = yield from self._calls(template)
            else:
                pen = Pen(self.reasoning)
                emit = pen.write if inside in _THOUGHTS else self.content
                if inside is None and template.implicit is None:
                    emit = _ignore
                boundary = yield from _search(self.source, _watch(self._template, inside), emit)
            if boundary is None:
                return
            name, match = boundary
            if inside is not None:
                self.layout()
                yield from self.source.space()
                inside = None
            else:
                inside, self._captures, self._opener = name, match.groupdict(), match.group()
                if inside in _THOUGHTS:
                    yield from self.source.space()

    def _calls(self, template: Any) -> Steps[tuple[str, Any] | None]:
        """Read a field of calls."""
        parts: list[str] = []
        watch = _watch(self._template, "tool_calls")
        boundary = yield from _search(self.source, watch, parts.append)
        body = "".join(parts)
        field = template.fields["tool_calls"]
        try:
            if boundary is None and (field.close_re is not None or not body):
                raise NotACall
            self._emit_calls(_value(body, field, self._captures))
        except (NotACall, ValueError, KeyError):
            self.content(
                self._opener + body + (boundary[1].group() if boundary is not None else "")
            )
        return boundary

    def _emit_calls(self, value: object) -> None:
        """Emit the events of one call or several. Raises NotACall."""
        calls = [
            _name_and_arguments(each) for each in (value if isinstance(value, list) else [value])
        ]
        if not calls:
            raise NotACall
        for name, arguments in calls:
            schema = parameters_of(self.context.tools, name)
            self.start(name)
            cast = {key: _cast(item, schema, key) for key, item in arguments.items()}
            self.arguments(json.dumps(cast, ensure_ascii=False))
            self.end()


def _ignore(text: str) -> None:
    pass


def _value(body: str, field: Any, captures: Mapping[str, str | None]) -> object:
    from transformers.utils.chat_parsing.content_parsers import process_field

    named_captures = {key: text for key, text in captures.items() if text is not None}
    return process_field(body, field, named_captures)


def _name_and_arguments(call: object) -> tuple[str, dict[str, object]]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotACall
    arguments = function.get("arguments", function.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = loads(arguments)
    if not isinstance(arguments, dict):
        raise NotACall
    return function["name"], arguments


def _cast(value: object, schema: Schema | None, key: str) -> object:
    """Convert a text to the type in the tool's schema."""
    allowed = allowed_kinds(schema, key)
    if not isinstance(value, str) or "string" in allowed:
        return value
    return json.loads(typed(value, allowed))


@frozen
class _Watch:
    """Patterns, by name, that open or close a field.

    heads: their possible first characters, if all of them are literal strings.
    """

    patterns: tuple[tuple[str, Any], ...]
    heads: regex.Pattern[str] | None


@cache
def _watch(template: str, inside: str | None) -> _Watch:
    """Return the patterns that end a field, or that open one if `inside` is None."""
    fields = _loaded(template).fields
    if inside is not None:
        patterns_by_name = [(inside, fields[inside].close_re)]
    else:
        patterns_by_name = [(field.name, field.open_re) for field in fields.values()]
    patterns = tuple((name, pattern) for name, pattern in patterns_by_name if pattern is not None)
    if any(_may_grow(pattern) for _, pattern in patterns):
        return _Watch(patterns, None)
    letters = "".join(_literal(pattern)[0] for _, pattern in patterns)
    return _Watch(patterns, regex.compile(f"[{regex.escape(letters)}]" if letters else r"(?!)"))


def _first(watch: _Watch, text: str, at: int) -> tuple[str, Any] | None:
    """Return the first match in a complete text; of several at one position, the longest."""
    searches = [(name, pattern.search(text, at)) for name, pattern in watch.patterns]
    matches = [(name, match) for name, match in searches if match is not None]
    best = min(matches, key=lambda each: (each[1].start(), -each[1].end()), default=None)
    return None if best is None or best[1].end() == best[1].start() else best


def _search(
    source: Source, watch: _Watch, emit: Callable[[str], None]
) -> Steps[tuple[str, Any] | None]:
    """Read up to and including a match; None if the text ends first."""
    while True:
        text = source.text
        start = source.at
        source.steps += 1 + len(text) - start
        best, hold = None, len(text)
        if watch.heads is not None and watch.heads.search(text, start) is None:
            pass
        elif source.final:
            best = _first(watch, text, start)
        else:
            for name, pattern in watch.patterns:
                match = pattern.search(text, start, partial=True)
                if match is None:
                    continue
                if match.partial or (match.end() == len(text) and _may_grow(pattern)):
                    hold = min(hold, match.start())
                elif best is None or (match.start(), -match.end()) < (
                    best[1].start(),
                    -best[1].end(),
                ):
                    best = name, match
            if best is not None and best[1].start() >= hold:
                best = None
            if len(text) - hold > _PATIENCE:
                hold = len(text)
        if best is not None:
            end, closing = best[1].start(), best[1].end()
            real = source.is_real(best[1].group(), end, closing, quotes=True)
            if real is not None:
                if real and end > source.at:
                    emit(source.advance(end))
                text = source.advance(closing)
                if real:
                    return best
                emit(text)
                continue
            hold = end
        if hold > source.at:
            emit(source.advance(hold if not source.final else len(text)))
        if source.final:
            return None
        yield


def _literal(pattern: regex.Pattern[str]) -> str:
    """Return the literal text of a pattern without operators."""
    return regex.sub(r"\\(.)", r"\1", pattern.pattern)


@cache
def _may_grow(pattern: regex.Pattern[str]) -> bool:
    """Whether more text could extend a match at the end of the text."""
    return regex.escape(_literal(pattern)) != pattern.pattern


class HfToolParser(ToolFormat):
    """The field `tool_calls`."""

    name = "hf"
    api = 1
    reader = HfReader
    examples = (
        weather(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n'
            "</tool_call>"
        ),
    )

    @property
    def words(self) -> tuple[str, ...]:
        return _literals(self.context)

    def layout(self) -> Layout | None:
        """Return the layout if calls are JSON between two tags; other conversions cannot be
        inverted.
        """
        field = _response_template(self.context).get("fields", {}).get("tool_calls", {})
        tags = _tags(field)
        transform = field.get("transform") or {"function": "{content}"}
        plain = field.get("content") == "json" and not field.get("content_args")
        if tags is None or not plain or transform.get("function") != "{content}":
            return None
        arguments = '{"city": "Oslo", "days": 3}'
        return Layout(f'{tags[0]}\n{{"name": "get_weather", "arguments": {arguments}}}\n{tags[1]}')

    def strict_openers(self) -> tuple[str, ...]:
        tags = _tags(_response_template(self.context).get("fields", {}).get("tool_calls", {}))
        return () if tags is None else tags[:1]

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Do nothing: the template defines what opens a field."""
        yield from ()


class HfReasoningParser(ReasoningFormat):
    """The field `thinking`."""

    name = "hf"
    api = 1
    tells_end = True
    reader = HfReader
    examples = (
        thought("<think>Hm.</think>\n\nHi"),
        Example("Hi", "Hi"),
        Example(
            "Hm.</think>\n\nHi",
            "Hi",
            "Hm.",
            context=ParseContext(prompt_tail="<|im_start|>assistant\n<think>\n"),
        ),
    )

    @property
    def opened(self) -> bool:
        reader = HfReader(self.context)
        reader.feed("")
        return reader._open in _THOUGHTS

    @property
    def words(self) -> tuple[str, ...]:
        return _literals(self.context)

    def ending(self, message: MessageReader) -> str | None:
        """Return the text that closes the field. Raises UnsupportedError if the template has no
        literal text for it.
        """
        endings = _literals(self.context, ("close",), _THOUGHTS)
        if not endings:
            raise UnsupportedError(
                "the checkpoint's response_template has no literal text that ends reasoning"
            )
        return endings[0]

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Do nothing: the template defines what opens a field."""
        yield from ()


def _response_template(context: ParseContext) -> Mapping[str, Any]:
    """Return the checkpoint's template, or the default."""
    tokenizer = context.tokenizer
    return (tokenizer.response_template if tokenizer is not None else None) or USUAL


def _tags(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the opening and closing text of a field, if both are literal, optionally after white
    space.
    """
    tags = []
    for key in ("open", "close"):
        text, pattern = field.get(key), field.get(f"{key}_pattern")
        if isinstance(pattern, str):
            bare = pattern.removeprefix(r"\s*")
            text = regex.sub(r"\\(.)", r"\1", bare)
            if regex.escape(text) != bare:
                return None
        if not isinstance(text, str) or not text:
            return None
        tags.append(text)
    return tags[0], tags[1]


def _literals(
    context: ParseContext,
    keys: tuple[str, ...] = ("open", "close"),
    names: tuple[str, ...] | None = None,
) -> tuple[str, ...]:
    """Return the literal markers in the template, of fields with these names or of all."""
    fields = _response_template(context).get("fields", {})
    markers: list[str] = []
    for name, field in fields.items():
        for key in keys if names is None or name in names else ():
            values = field.get(key, [])
            markers += [values] if isinstance(values, str) else values
    return tuple(markers)
