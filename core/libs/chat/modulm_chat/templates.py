"""Runs chat templates as untrusted programs: sandboxed Jinja with size, output and time limits.

The dialect is Hugging Face's: trimmed blocks, `break` and `continue`, a `generation` block,
`tojson` without HTML escapes, `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modulm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.parser import Parser
    from jinja2.runtime import Context

__all__ = [
    "MAX_SECONDS",
    "MAX_TEMPLATE",
    "ContentFormat",
    "TemplateFailed",
    "check_template",
    "content_format",
    "execute",
    "parse_template",
]

ContentFormat = Literal["string", "openai"]

#: Maximum length of a template in characters. The longest known templates have 30 thousand.
MAX_TEMPLATE = 512 * 1024
#: Maximum output of one rendering in characters.
MAX_OUTPUT = 64 * 1024 * 1024
#: Time limit of one rendering in seconds.
MAX_SECONDS = 5.0

#: A variable name that neither a template nor a request can use.
_DEADLINE = "\0deadline"


class TemplateFailed(RequestError):
    """A template could not be compiled or rendered."""


class _Guard(Extension):
    """Accepts `{% generation %}` blocks, which only training uses, and renders their contents.

    Also provides `tick`, which `_limit_loops` adds to every loop and macro.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self, context: Context) -> str:
        if time.monotonic() > context.parent.get(_DEADLINE, 0.0):
            raise TemplateFailed("the chat template took too long to render", "chat_template")
        return ""

    def call(self) -> nodes.ExprStmt:
        """Return the statement to insert at the start of a loop's body."""
        return nodes.ExprStmt(self.call_method("tick", [nodes.ContextReference()]))


class _PlainDict:
    """`dict(...)` for templates, without the attributes of the real one."""

    def __call__(self, *args: Any, **keywords: Any) -> dict[Any, Any]:
        return dict(*args, **keywords)


def _raise(message: str) -> None:
    raise TemplateFailed(str(message), "messages")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Guard, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _PlainDict()
    return environment


def parse_template(source: str) -> nodes.Template:
    """Parse a template. Raises TemplateFailed if it is too long or not valid Jinja."""
    if len(source) > MAX_TEMPLATE:
        raise TemplateFailed(
            f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE}",
            "chat_template",
        )
    try:
        return _environment().parse(source)
    except TemplateSyntaxError as error:
        raise TemplateFailed(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
            "chat_template",
        ) from error
    except RecursionError as error:
        raise TemplateFailed("the chat template is nested too deeply", "chat_template") from error


def check_template(source: str) -> None:
    """Raise TemplateFailed if the template cannot be compiled."""
    _compile(source)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _environment()
    tree = parse_template(source)
    _limit_loops(tree, environment)
    try:
        code = environment.compile(tree)
    except TemplateSyntaxError as error:
        raise TemplateFailed(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
            "chat_template",
        ) from error
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise TemplateFailed("the chat template is nested too deeply", "chat_template") from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _limit_loops(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Make every loop and macro check the deadline."""
    guard: Any = environment.extensions[_Guard.identifier]
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        node.body.insert(0, guard.call().set_lineno(node.lineno))  # type: ignore[attr-defined]
    tree.set_environment(environment)


def execute(
    source: str,
    variables: Mapping[str, Any],
    seconds: float = MAX_SECONDS,
    max_output: int = MAX_OUTPUT,
) -> str:
    """Render a template. seconds: time limit; max_output: in characters.

    Raises TemplateFailed, with the template's own message if it called `raise_exception`.
    """
    template = _compile(source)
    deadline = time.monotonic() + seconds
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate({**variables, _DEADLINE: deadline}):
            pieces.append(piece)
            size += len(piece)
            if size > max_output or time.monotonic() > deadline:
                raise TemplateFailed("the chat template produces too much text", "chat_template")
    except TemplateFailed:
        raise
    except SecurityError as error:
        raise TemplateFailed(
            f"the chat template uses what the sandbox forbids: {error}", "chat_template"
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise TemplateFailed(
            f"the chat template rejects the messages: {error}", "messages"
        ) from error
    except (RuntimeError, MemoryError, AttributeError, OverflowError) as error:
        raise TemplateFailed(
            "the chat template cannot render these messages", "messages"
        ) from error
    return "".join(pieces)


@lru_cache(maxsize=32)
def content_format(source: str) -> ContentFormat:
    """Return the content format of a template: `openai` if it loops over contents, else
    `string`.
    """
    tree = parse_template(source)
    holders = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    names = frozenset(holders)
    loops = any(_is_content(node.iter, names) for node in tree.find_all(nodes.For))
    return "openai" if loops else "string"


def _is_content(node: nodes.Node | None, holders: frozenset[str]) -> bool:
    """Whether an expression is a message's content, possibly filtered."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node, holders)
    if isinstance(node, nodes.Name):
        return node.name in holders
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
