"""`modulm parse`: parses a model's raw output into content, reasoning and tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["command"]


@click.command("parse")
@click.argument("file", type=click.File("r", encoding="utf-8"), default="-")
@click.option(
    "--tool-call-parser", "--tool-parser", "tool_parser", metavar="NAME", help="Tool parser to use."
)
@click.option("--reasoning-parser", metavar="NAME", help="Reasoning parser to use.")
@click.option("--tool-parser-plugin", metavar="FILE", help="Python file that registers parsers.")
@click.option(
    "--reasoning-parser-plugin", metavar="FILE", help="Python file that registers parsers."
)
@click.option("--tools", metavar="JSON|FILE", help="The request's tools, in OpenAI's format.")
@click.option(
    "--tool-choice",
    default="auto",
    show_default=True,
    help="Tool choice of the request: auto, none or required.",
)
@click.option("--prompt", help="End of the rendered prompt, for parsers that need it.")
@click.option(
    "--chat-template-kwargs",
    metavar="JSON",
    help="Chat template variables, for parsers that need them.",
)
@click.option(
    "--tokenizer", metavar="FOLDER", help="Tokenizer, to recognize markers by their token ids."
)
@click.option(
    "--chunk", type=int, metavar="N", help="Feed N characters at a time; the result is the same."
)
@click.option(
    "--events", "--deltas", "events", is_flag=True, help="Print the events, one JSON per line."
)
def command(
    file: Any,
    tool_parser: str | None,
    reasoning_parser: str | None,
    tool_parser_plugin: str | None,
    reasoning_parser_plugin: str | None,
    tools: str | None,
    tool_choice: str,
    prompt: str | None,
    chat_template_kwargs: str | None,
    tokenizer: str | None,
    chunk: int | None,
    events: bool,
) -> None:
    """Parse a model's raw output and print the message as JSON.

    Reads FILE, or standard input.
    """
    import attrs

    from modulm.contracts.parser import ToolStart
    from modulm_parsing import parse

    _run_files(tool_parser_plugin, reasoning_parser_plugin)
    keywords = _json("--chat-template-kwargs", chat_template_kwargs or "{}")
    text = file.read()
    message = parse(
        text,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=_tools(tools),
        tool_choice=_choice(tool_choice),
        tokenizer=_tokenizer(tokenizer),
        chat_template_kwargs=keywords,
        prompt=prompt,
        pieces=[text[i : i + chunk] for i in range(0, len(text), chunk)] if chunk else None,
    )
    if events:
        for event in message.deltas:
            event_fields = {"event": type(event).__name__, **attrs.asdict(event)}
            if isinstance(event, ToolStart) and event.id is None:
                del event_fields["id"]  # the server creates ids
            click.echo(json.dumps(event_fields, ensure_ascii=False))
        return
    message_fields = attrs.asdict(message, filter=lambda attribute, _: attribute.name != "deltas")
    click.echo(json.dumps(message_fields, ensure_ascii=False, indent=2))


def _run_files(tool: str | None, reasoning: str | None) -> None:
    from modulm.errors import ConfigError
    from modulm.plugins.files import load_file

    for flag, path in (("tool_parser_plugin", tool), ("reasoning_parser_plugin", reasoning)):
        if path:
            try:
                load_file(flag, path)
            except ConfigError as error:
                raise click.BadParameter(
                    error.message, param_hint=f"--{flag.replace('_', '-')}"
                ) from error


def _tokenizer(folder: str | None) -> Any:
    if folder is None:
        return None
    from modulm_tokenizers.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"not valid JSON: {error}", param_hint=option) from error


def _tools(value: str | None) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    tools = _json("--tools", value if value.lstrip().startswith(("[", "{")) else _read(value))
    return tools if isinstance(tools, list) else [tools]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"cannot read {path}", param_hint="--tools") from error


def _choice(value: str) -> Any:
    """Parse a tool choice, which is JSON or the name of a function."""
    if value in ("auto", "none", "required"):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    return {"type": "function", "function": {"name": value}}
