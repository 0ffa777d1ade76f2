"""The pages of docs/ that are written from the code: cli.md, http-api.md, metrics.md.

`tools/reference.py` writes them, `tests/unit/docs/test_reference.py` says when they are old.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from prometheus_client import CollectorRegistry

from modulm.cli.main import cli
from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tokenizer
from modulm.text.tokenizer import load_tokenizer
from modulm_cli.options import FlagCommand
from modulm_server.app import create_app
from modulm_server.engine.metrics import Metrics
from modulm_server.metrics import HttpMetrics
from modulm_server.scripted import ScriptedEngine, scripted_info

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_WRITTEN = "Written by `tools/reference.py` from {}; a test checks that it is current.\n"


def cell(text: str) -> str:
    """Text that a table's cell holds."""
    return " ".join(text.split()).replace("|", "\\|")


def cells(*parts: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(cell, parts))} |\n"


# cli.md


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    """The command and all below it, by what is typed."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from commands(found, (*path, name))


def option_row(option: click.Option, context: click.Context) -> str:
    """One option of a command."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    record = option.get_help_record(context)
    # Brackets would be links.
    text = re.sub(r"\[([^\]]*)\]", r"(\1)", (record[1] if record else option.help) or "")
    if isinstance(option.type, click.Choice):
        text += f" One of {', '.join(map(str, option.type.choices))}."
    elif not option.is_flag and not option.count:
        shown = option.metavar or option.type.name.upper()
        names += f" {shown}"
    return cells(names, text)


def command_section(words: str, command: click.Command) -> str:
    """A heading, what it is for, how it is called, and its own options."""
    context = click.Context(command, info_name=words)
    level = "#" * min(4, len(words.split()))
    usage = " ".join(command.collect_usage_pieces(context))
    text = f"\n{level} {words}\n\n" if words != "modulm" else "\n"
    told = re.sub(r"(?m)^\x08\n", "", command.help or "")
    text += f"{plain(told)}\n\n```text\n{words} {usage}\n```\n"
    own = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if own:
        text += "\n| option | what it does |\n|---|---|\n"
        text += "".join(option_row(option, context) for option in own)
    if isinstance(command, FlagCommand):
        text += "\nAnd the flags of [configuration](config.md)"
        text += ", those of the server too.\n" if command.server else ".\n"
    return text


def plain(text: str) -> str:
    """A docstring as Markdown: paragraphs, with its indentation taken away."""
    paragraphs = re.split(r"\n\s*\n", text.strip().partition("\x0c")[0])
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def cli_page() -> str:
    """docs/cli.md."""
    text = "# Commands\n\n" + _WRITTEN.format("the commands of the installed packages")
    text += "Each command is a package; `modulm --help` lists those that are installed.\n"
    for words, command in commands(cli, ("modulm",)):
        text += command_section(words, command)
    return text


# http-api.md


def described() -> dict[str, Any]:
    """The OpenAPI description of a server with every route."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer = load_tokenizer(make_tokenizer(Path(place), vocab=512))
    engine = ScriptedEngine(tokenizer, info=scripted_info(tokenizer, adapters=True))
    flags = {"server_dev_mode": True, "enable_lora": True, "allow_runtime_lora_updating": True}
    served = create_app(engine, EngineConfig.from_keywords(model="M", **flags))
    found: dict[str, Any] = served.api.openapi()
    return found


def type_of(schema: dict[str, Any], shapes: dict[str, Any]) -> str:
    """A schema in words: `integer, 1 to 128`."""
    if "$ref" in schema:
        return type_of(shapes.get(schema["$ref"].rpartition("/")[2], {}), shapes)
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        words = [type_of(part, shapes) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(words)) or "any"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        inner = type_of(schema.get("items", {}), shapes)
        return "list" if inner == "any" else f"list of {inner}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    # 32 and 64 bits are no bounds that anybody meets.
    if low is not None and abs(low) < 1 << 30:
        above = "above " if "exclusiveMinimum" in schema else ""
        kind += f", {above}{low:g}" + (f" to {high:g}" if high and high < 1 << 30 else " or more")
    return str(kind)


def fields_of(operation: dict[str, Any], shapes: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, type, what it says) of a body's fields, those that must be there first."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = next((each["schema"] for each in content.values()), {})
    while "$ref" in schema:
        schema = shapes[schema["$ref"].rpartition("/")[2]]
    needed = schema.get("required", ())
    found = []
    for name, value in schema.get("properties", {}).items():
        words = "required" if name in needed else value.get("description", "")
        found.append((name, type_of(value, shapes), words))
    return sorted(found, key=lambda row: row[2] != "required")


def http_page() -> str:
    """docs/http-api.md."""
    document = described()
    shapes = document["components"]["schemas"]
    text = "# HTTP API\n\n" + _WRITTEN.format("the routes of the installed packages")
    text += """
A server describes itself at `/docs` and `/openapi.json`, with the shapes of all answers and of each
event of a stream. [The server](server.md) says which flags bring which routes; those here are of a
server with `--enable-lora --allow-runtime-lora-updating --server-dev-mode`. A field that is not
there yet is an error that says so. Errors of OpenAI's routes are
`{"error": {"message", "type", "param", "code"}}`, those of other APIs have theirs.
"""
    families: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["Other"])[0]
            families.setdefault(tag, []).append((method.upper(), path, operation))
    for tag, found in sorted(families.items()):
        text += f"\n## {tag}\n\n| route | what it does |\n|---|---|\n"
        for method, path, operation in found:
            first = (operation.get("description") or "").partition("\n\n")[0]
            text += cells(f"`{method} {path}`", first)
        seen: dict[tuple[Any, ...], list[str]] = {}
        for method, path, operation in found:
            if fields := tuple(fields_of(operation, shapes)):
                seen.setdefault(fields, []).append(f"`{method} {path}`")
        for fields, names in seen.items():
            text += f"\n### {', '.join(names)}\n\n| field | type | |\n|---|---|---|\n"
            text += "".join(cells(f"`{name}`", kind, words) for name, kind, words in fields)
    return text


# metrics.md


def families() -> list[Any]:
    """All metrics that a server can have."""
    engine = Metrics("M", adapters=1)
    engine.in_use = lambda: ((), ())
    registry = CollectorRegistry(auto_describe=False)
    HttpMetrics(registry)
    return [*engine.registry().collect(), *registry.collect()]


def name_of(family: Any) -> str:
    """What a family is called in queries; a histogram's series have more behind it."""
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def metrics_page() -> str:
    """docs/metrics.md."""
    text = "# Metrics\n\n" + _WRITTEN.format("what `/metrics` collects")
    text += """
`/metrics` is Prometheus' text format. Names are vLLM's after the prefix `modulm:`, with the labels
`model_name` and `engine`; those of HTTP have `handler` (the route, never a path that a client made
up), `method` and `status` (`2xx` ...). With several server processes, whichever is asked adds up
all of them. [Prometheus and Grafana](deployment.md#prometheus-and-grafana) has a configuration and
a dashboard.

A histogram `x` is queried as `x_bucket`, `x_sum` and `x_count`. Metrics of adapters are there with
`--enable-lora`; those of the process only on Linux.

| metric | type | what it counts |
|---|---|---|
"""
    for family in families():
        text += cells(f"`{name_of(family)}`", family.type, family.documentation)
    return text


PAGES = {"cli": cli_page, "http-api": http_page, "metrics": metrics_page}


def main() -> int:
    """Write the pages that have changed."""
    for name, page in PAGES.items():
        path, text = DOCS / f"{name}.md", page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
