"""`modulm parse`: a model's raw output to content, reasoning and tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["command"]


@click.command("parse")
@click.argument("file", type=click.File("r", encoding="utf-8"), default="-")
@click.option("--tool-call-parser", "tool_parser", metavar="NAME", help="Tool parser to use.")
@click.option("--reasoning-parser", metavar="NAME", help="Reasoning parser to use.")
@click.option("--tools", metavar="JSON|FILE", help="The request's tools, as OpenAI writes them.")
@click.option("--tool-choice", default="auto", show_default=True, help="auto, none, required.")
@click.option("--prompt", help="End of the rendered prompt, where a parser needs it.")
@click.option("--chunk", type=int, metavar="N", help="Feed N characters at a time; same result.")
@click.option("--deltas", is_flag=True, help="Print the events of a stream, one JSON per line.")
def command(
    file: Any,
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: str | None,
    tool_choice: str,
    prompt: str | None,
    chunk: int | None,
    deltas: bool,
) -> None:
    """Parse a model's raw output, from FILE or standard input, and print the message as JSON."""
    import attrs

    from modulm_parsing import parse

    text = file.read()
    chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)] if chunk else None
    message = parse(
        text,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=_tools(tools),
        tool_choice=_choice(tool_choice),
        prompt=prompt,
        chunks=chunks,
    )
    if deltas:
        for event in message.deltas:
            click.echo(json.dumps({"event": type(event).__name__, **attrs.asdict(event)}))
        return
    shown = attrs.asdict(message, filter=lambda attribute, _: attribute.name != "deltas")
    click.echo(json.dumps(shown, ensure_ascii=False, indent=2))


def _tools(given: str | None) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    text = given if given.lstrip().startswith(("[", "{")) else _read(given)
    try:
        tools = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"not valid JSON: {error}", param_hint="--tools") from error
    return tools if isinstance(tools, list) else [tools]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"cannot read {path}", param_hint="--tools") from error


def _choice(given: str) -> Any:
    """A named choice may be written as JSON or as the function's name."""
    if given in ("auto", "none", "required"):
        return given
    if given.lstrip().startswith("{"):
        return json.loads(given)
    return {"type": "function", "function": {"name": given}}
