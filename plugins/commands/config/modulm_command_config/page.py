"""docs/config.md, written from the schema."""

from __future__ import annotations

from collections.abc import Iterator

from modulm.config.schema.engine import GROUPS, TABLES
from modulm.config.schema.flags import Flag, Kind, flags_of

__all__ = ["markdown"]

_INTRO = """\
# Configuration

Written by `modulm config docs` from the schema in `core/modulm/config/schema`; a test checks that
it is current.

Every flag below is an option of `modulm serve` and of the other commands that run a model
(`--max-model-len 8k`), a key of a `--config` file (`max-model-len: 8k` or `max_model_len: 8k`), a
name in the environment (`MODULM_MAX_MODEL_LEN=8k`) and a keyword of `LLM(max_model_len=8192)`.
The command line or keyword wins over the file, the file over the environment, the environment
over the default. Switches have a `--no-` form. Whole numbers may be written `8k` (8,000), `8K`
(8,192) or `25.6k`. A flag that holds JSON may be written in parts: `--hf-overrides.a.b 1`,
`--hf-overrides.list+ x,y`.

A flag without a remark works. *No effect*: accepted, and a note says why nothing changes.
*Refused*: an error that names what to use instead. *Not yet*: an error until the feature is there.
`modulm config explain MODEL` says where each value comes from.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRO
    tables = {group: table for table, group in TABLES.items()}
    for name, group in GROUPS.items():
        title: str = group.TITLE  # type: ignore[attr-defined]
        yield f"## {title}\n"
        yield f"{(group.__doc__ or '').strip()} In code: `config.{name}`.\n"
        if name in tables:
            option = tables[name].replace("_", "-")
            yield f"As one JSON value: `--{option}`; rows written `{option}.key` are its keys.\n"
        yield "| flag | default | what it does |"
        yield "|---|---|---|"
        for spec in flags_of(group):
            yield _row(spec, tables.get(name))
        yield ""


def _row(spec: Flag, table: str | None) -> str:
    names = [f"`{option}`" for option in (spec.option, *spec.aliases)]
    if not spec.own:
        names = [f"`{(table or '').replace('_', '-')}.{spec.key}`"]
    return f"| {', '.join(names)} | {_default(spec)} | {_escape(' '.join(_remarks(spec)))} |"


def _default(spec: Flag) -> str:
    if spec.default in (None, "", (), {}) and spec.default is not False:
        return ""
    value = " ".join(map(str, spec.default)) if isinstance(spec.default, tuple) else spec.default
    return f"`{value}`"


def _remarks(spec: Flag) -> Iterator[str]:
    yield spec.help
    if spec.choices:
        yield f"Choices: {', '.join(spec.choices)}{', and installed plugins' * bool(spec.kind)}."
    elif spec.kind:
        yield f"Choices: installed plugins of kind `{spec.kind}`."
    if spec.unit:
        yield f"Unit: {spec.unit}."
    if spec.deprecated:
        yield f"*Deprecated*: {spec.deprecated}."
    if spec.state.kind is not Kind.WORKS:
        yield f"*{spec.state.kind.value.capitalize()}*: {spec.state.reason}."


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
