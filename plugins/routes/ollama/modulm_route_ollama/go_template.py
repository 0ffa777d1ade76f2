"""Converts Ollama's templates to Jinja: the actions of Go's text/template that they use.

A template with `.Messages` renders a conversation; an older one renders one turn, of `.System`,
`.Prompt` and `.Response`, and is repeated for each turn. What follows `.Response` is left out where
the model is to answer.

Source: https://github.com/ollama/ollama/blob/main/docs/template.md, https://pkg.go.dev/text/template
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from attrs import define, field

__all__ = ["TemplateError", "to_jinja"]

#: Characters and actions of the longest template.
_LONGEST, _MOST_ACTIONS = 1 << 16, 2000
#: Stands for the answer that is to come.
_ANSWER = "\ue010"
_ACTION = re.compile(
    r"\{\{(-(?=\s))?\s*"
    r'(/\*.*?\*/|(?:"(?:\\.|[^"\\])*"|`[^`]*`|[^"`])*?)'
    r"\s*((?<=\s)-)?\}\}",
    re.DOTALL,
)
_TOKEN = re.compile(
    r'\s*("(?:\\.|[^"\\])*"|`[^`]*`|-?\d+(?:\.\d+)?|\$\w*(?:\.\w+)*|(?:\.\w+)+|\.|:=|\w+|[()|=,])'
)
_COMPARISONS = {"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
#: Fields of a turn's or a conversation's data.
_ROOT = {
    "Messages": "messages", "Tools": "(tools or [])", "System": "go.system", "Prompt": "go.prompt",
    "Response": "go.response", "Suffix": "''", "Think": "go.think", "ThinkLevel": "''",
    "IsThinkSet": "(enable_thinking is defined)", "First": "go.first",
}  # fmt: skip
#: Fields of messages whose name is not the same in lower case.
_FIELDS = {"ToolCalls": "tool_calls", "ToolName": "name", "ToolCallID": "tool_call_id"}
#: Fields that are written as JSON.
_JSON = ("Arguments", "Parameters", "Tools", "Function", "Properties")
_START = (
    "{%- set go = namespace(system='', prompt='', response='', first=true, pending=false,"
    " think=(enable_thinking is defined and enable_thinking)) -%}"
    "{%- set v = namespace() -%}"
)
_SYSTEM = (
    "{%- for m in messages if m.role in ('system', 'developer') -%}"
    "{%- set go.system = go.system ~ ('\\n\\n' if go.system else '') ~ m.content -%}{%- endfor -%}"
)


class TemplateError(ValueError):
    """A template that cannot be converted."""


def to_jinja(text: str) -> str:
    """Convert a template. Raises TemplateError naming the action."""
    if len(text) > _LONGEST or text.count("{{") > _MOST_ACTIONS:
        raise TemplateError(f"more than {_LONGEST} characters or {_MOST_ACTIONS} actions")
    parts = list(_parts(text))
    body = _Converter(iter(parts)).block(())
    macro = "{%- macro go_turn() -%}" + body + "{%- endmacro -%}"
    cut = f"go_turn().split('{_ANSWER}')[0]"
    if any(re.search(r"\.Messages\b", action) for action, is_text in parts if not is_text):
        return f"{_START}{_SYSTEM}{{%- set go.response = '{_ANSWER}' -%}}{macro}{{{{ {cut} }}}}"
    flush = "{{ go_turn() }}{%- set go.system = '' -%}{%- set go.prompt = '' -%}"
    flush += (
        "{%- set go.response = '' -%}{%- set go.first = false -%}{%- set go.pending = false -%}"
    )
    return (
        f"{_START}{macro}{{%- for m in messages -%}}"
        "{%- if m.role in ('system', 'developer') -%}"
        f"{{%- if go.pending and go.prompt -%}}{flush}{{%- endif -%}}"
        "{%- set go.system = m.content -%}{%- set go.pending = true -%}"
        "{%- elif m.role == 'assistant' -%}"
        f"{{%- set go.response = m.content or '' -%}}{flush}"
        "{%- else -%}"
        f"{{%- if go.prompt -%}}{flush}{{%- endif -%}}"
        "{%- set go.prompt = m.content -%}{%- set go.pending = true -%}"
        "{%- endif -%}{%- endfor -%}"
        f"{{%- if go.pending or add_generation_prompt -%}}{{%- set go.response = '{_ANSWER}' -%}}"
        f"{{{{ {cut} }}}}{{%- endif -%}}"
    )


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """(text or action, whether it is text), with text trimmed as `{{-` and `-}}` ask."""
    end, trim = 0, False
    for match in _ACTION.finditer(text):
        before = text[end : match.start()]
        before = before.lstrip() if trim else before
        if match[1]:
            before = before.rstrip()
        if before:
            yield before, True
        if not match[2].startswith("/*"):
            yield match[2], False
        end, trim = match.end(), bool(match[3])
    rest = text[end:]
    if "{{" in rest:
        raise TemplateError(f"the action {rest[rest.index('{{') :][:40]!r} has no end")
    if rest := rest.lstrip() if trim else rest:
        yield rest, True


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "'"


@define
class _Converter:
    """Converts actions one after the other. dots: what `.` is in each block that is open; "" at the
    top.
    """

    _parts: Iterator[tuple[str, bool]]
    _dots: list[str] = field(factory=lambda: [""])
    _loops: int = 0
    _end: str = ""

    def block(self, ends: Sequence[str]) -> str:
        """Convert up to one of the actions `ends`, which `_end` then is; () for the whole text."""
        written: list[str] = []
        for part, is_text in self._parts:
            if is_text:
                written.append(f"{{{{ {_literal(part)} }}}}")
                continue
            word, _, rest = part.partition(" ")
            if word in ("end", "else"):
                if word not in ends:
                    raise TemplateError(f"{{{{ {part} }}}} has no beginning")
                self._end = part
                return "".join(written)
            written.append(self._action(part, word, rest.strip()))
        if ends:
            raise TemplateError("an {{ if }}, {{ range }} or {{ with }} has no {{ end }}")
        return "".join(written)

    def _action(self, part: str, word: str, rest: str) -> str:
        match word:
            case "if":
                return self._if(rest)
            case "range":
                return self._range(rest)
            case "with":
                return self._with(rest)
            case "break" | "continue":
                return f"{{%- {word} -%}}"
            case "define" | "template" | "block":
                raise TemplateError(f"the action {word!r} is not supported")
        assigned = re.fullmatch(r"\$(\w+)\s*:?=\s*(.+)", part, re.DOTALL)
        if assigned:
            return f"{{%- set v.{assigned[1]} = {self._expression(assigned[2])} -%}}"
        value = self._expression(part)
        last = re.search(r"\.(\w+)$", part)
        if last and last[1] in _JSON:
            value = f"({value} if {value} is string else {value} | tojson)"
        return f"{{{{ {value} }}}}"

    def _if(self, condition: str) -> str:
        written = f"{{%- if {self._expression(condition)} -%}}{self.block(('end', 'else'))}"
        while self._end.startswith("else"):
            other = self._end[4:].strip()
            if other.startswith("if "):
                written += f"{{%- elif {self._expression(other[3:])} -%}}"
            else:
                written += "{%- else -%}"
            written += self.block(("end", "else"))
        return written + "{%- endif -%}"

    def _range(self, header: str) -> str:
        names = re.fullmatch(r"(?:\$(\w+)\s*(?:,\s*\$(\w+)\s*)?:?=)?\s*(.+)", header, re.DOTALL)
        if names is None:
            raise TemplateError(f"cannot read {{{{ range {header} }}}}")
        source = self._expression(names[3])
        key, value = (names[1], names[2]) if names[2] else (None, names[1])
        self._loops += 1
        one, table, dot = (f"{kind}{self._loops}" for kind in ("item", "table", "dot"))
        written = f"{{%- set {table} = {source} is mapping -%}}"
        written += f"{{%- for {one} in (({source}).items() if {table} else {source}) -%}}"
        written += f"{{%- set {dot} = {one}[1] if {table} else {one} -%}}"
        if key and key != "_":
            written += f"{{%- set v.{key} = {one}[0] if {table} else loop.index0 -%}}"
        if value and value != "_":
            written += f"{{%- set v.{value} = {dot} -%}}"
        self._dots.append(dot)
        written += self.block(("end", "else"))
        self._dots.pop()
        if self._end.startswith("else"):
            written += "{%- else -%}" + self.block(("end",))
        return written + "{%- endfor -%}"

    def _with(self, header: str) -> str:
        self._loops += 1
        dot = f"dot{self._loops}"
        written = f"{{%- set {dot} = {self._expression(header)} -%}}{{%- if {dot} -%}}"
        self._dots.append(dot)
        written += self.block(("end", "else"))
        self._dots.pop()
        if self._end.startswith("else"):
            written += "{%- else -%}" + self.block(("end",))
        return written + "{%- endif -%}"

    # Expressions.

    def _expression(self, text: str) -> str:
        tokens: list[str] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise TemplateError(f"cannot read {text[at:].strip()[:40]!r}")
            tokens.append(match[1])
            at = match.end()
        reader = _Reader(tokens, self._operand)
        value = reader.pipeline()
        if reader.tokens:
            raise TemplateError(f"cannot read {text.strip()[:60]!r}")
        return value

    def _operand(self, token: str) -> str:
        if token[0] in '"`':
            raw = token[1:-1]
            return _literal(raw if token[0] == "`" else _unescaped(raw))
        if token[0] == "$":
            name, *fields = token[1:].split(".")
            return self._fields(f"v.{name}" if name else "", fields)
        if token[0] == ".":
            return self._fields(self._dots[-1], [one for one in token.split(".") if one])
        if token in ("true", "false"):
            return token
        if token == "nil":
            return "none"
        if token[0].isdigit() or token[0] == "-":
            return token
        raise TemplateError(f"the function {token!r} is not supported")

    def _fields(self, base: str, names: Sequence[str]) -> str:
        """Fields of a value; of the conversation's data if it is ""."""
        rest = list(names)
        if not base:
            if not rest:
                raise TemplateError("'.' outside of a range is not supported")
            name = rest.pop(0)
            if name not in _ROOT:
                raise TemplateError(f"the field .{name} is not supported")
            base = _ROOT[name]
        for name in rest:
            base = _field_of(base, name)
        return base


def _field_of(base: str, name: str) -> str:
    if name == "Content":
        return f"({base}.content or '')"
    if name == "Thinking":
        return f"({base}.reasoning_content or {base}.reasoning or '')"
    if name in ("ToolCalls", "Images"):
        return f"({base}.{_FIELDS.get(name, name.lower())} or [])"
    return f"{base}.{_FIELDS.get(name, name.lower())}"


@define
class _Reader:
    """Reads the tokens of a pipeline."""

    tokens: list[str]
    _operand: Callable[[str], str]

    def pipeline(self) -> str:
        value = self._command(())
        while self.tokens and self.tokens[0] == "|":
            self.tokens.pop(0)
            value = self._command((value,))
        return value

    def _command(self, piped: Sequence[str]) -> str:
        if not self.tokens:
            raise TemplateError("an action is empty")
        head = self.tokens[0]
        if not head[0].isalpha() or head in ("true", "false", "nil"):
            value = self._argument()
            if piped or (self.tokens and self.tokens[0] not in ("|", ")")):
                raise TemplateError(f"{head!r} is not a function")
            return value
        self.tokens.pop(0)
        arguments: list[str] = []
        while self.tokens and self.tokens[0] not in ("|", ")"):
            arguments.append(self._argument())
        return _call(head, [*arguments, *piped])

    def _argument(self) -> str:
        token = self.tokens.pop(0)
        if token != "(":
            if token[0].isalpha() and token not in ("true", "false", "nil"):
                return _call(token, [])
            return self._operand(token)
        value = self.pipeline()
        if not self.tokens or self.tokens.pop(0) != ")":
            raise TemplateError("a parenthesis has no end")
        return f"({value})"


def _call(name: str, given: list[str]) -> str:
    """Call one of the functions of text/template or of Ollama."""
    match name, given:
        case (("and" | "or"), [_, *_]):
            return "(" + f" {name} ".join(given) + ")"
        case "not", [one]:
            return f"(not {one})"
        case "eq", [one, other]:
            return f"({one} == {other})"
        case "eq", [one, _, *_]:
            return f"({one} in ({', '.join(given[1:])}))"
        case (("ne" | "lt" | "le" | "gt" | "ge"), [one, other]):
            return f"({one} {_COMPARISONS[name]} {other})"
        case "len", [one]:
            return f"({one} | length)"
        case "index", [one, *at] if at:
            return one + "".join(f"[{place}]" for place in at)
        case "slice", [one, *bounds] if len(bounds) <= 2:
            return f"{one}[{':'.join([*bounds, ''] if len(bounds) == 1 else bounds) or ':'}]"
        case (("json" | "toJson"), [one]):
            return f"({one} | tojson)"
        case (("print" | "toString"), [one]):
            return f"({one} | string)"
        case "currentDate", []:
            return "strftime_now('%Y-%m-%d')"
        case _:
            return _unknown(name, given)


def _unknown(name: str, given: Sequence[str]) -> NoReturn:
    plural = "" if len(given) == 1 else "s"
    raise TemplateError(
        f"the function {name!r} with {len(given)} argument{plural} is not supported"
    )


def _unescaped(text: str) -> str:
    """A Go string's text, without its quotes."""
    known = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda match: known.get(match[1], match[0]), text)
