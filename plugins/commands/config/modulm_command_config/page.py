"""docs/config.md, written from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modulm.config.schema.catalog import Group, catalog
from modulm.config.schema.known import KnownFlag
from modulm.contracts.flags import Flag

__all__ = ["markdown"]

_INTRO = """\
# Configuration

Written by `modulm config docs` from the groups of flags in `core/modulm/contracts/config` and in the
installed packages; a test checks that it is current.

Every flag below is an option of `modulm serve` and of the other commands that run a model
(`--max-model-len 8k`), a key of a `--config` file (`max-model-len: 8k` or `max_model_len: 8k`), a
name in the environment (`MODULM_MAX_MODEL_LEN=8k`) and a keyword of `LLM(max_model_len=8192)`.
The command line or keyword wins over the file, the file over the environment, the environment
over the default. Switches have a `--no-` form. Whole numbers may be written `8k` (8,000), `8K`
(8,192) or `25.6k`. A flag that holds JSON may be written in parts: `--hf-overrides.a.b 1`,
`--hf-overrides.list+ x,y`.

Other flags of vLLM [are listed at the end](#flags-of-vllm-that-nothing-here-reads), with what
happens when a command line has them. A package may bring [flags of its
own](write-a-plugin.md#flags-of-your-own). `modulm config explain MODEL` says where each value comes
from.
"""

_ELSEWHERE = """\
## Flags of vLLM that nothing here reads

*No effect*: accepted, and a note says why nothing changes. *Renamed*: the other flag is set, and a
note says so. *Refused*: any value but the default is an error that names what to use instead. *Not
yet*: an error until the feature is there. *Not installed*: an error that names the package.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRO
    for group in catalog().groups:
        yield from _group(group)
    yield _ELSEWHERE
    yield "| what happens | flags |"
    yield "|---|---|"
    for remark, flags in _by_remark(catalog().elsewhere()).items():
        yield f"| {_escape(remark)} | {', '.join(f'`{spec.option}`' for spec in flags)} |"
    yield ""


def _group(group: Group) -> Iterator[str]:
    name, table = group.cls.__name__, group.cls.table
    read = f"group({name})" if group.origin else group.name
    origin = f" Brought by `{group.origin}`." if group.origin else ""
    yield f"## {group.cls.title}\n"
    yield f"{(group.cls.__doc__ or '').strip()}{origin} In code: `config.{read}`.\n"
    if table:
        option = table.replace("_", "-")
        yield f"As one JSON value: `--{option}`; rows written `{option}.key` are its keys.\n"
    yield "| flag | default | what it does |"
    yield "|---|---|---|"
    for spec in group.flags:
        yield _row(spec, table)
    yield ""


def _by_remark(flags: Iterable[KnownFlag]) -> dict[str, list[KnownFlag]]:
    """Flags by what a user is told about them."""
    found: dict[str, list[KnownFlag]] = {}
    for spec in flags:
        remark = f"*{spec.state.kind.value.capitalize()}*: {spec.state.reason}"
        found.setdefault(remark, []).append(spec)
    return found


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


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
