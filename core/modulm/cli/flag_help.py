"""`--help` of commands with hundreds of flags: an overview, one group, one flag, or all."""

from __future__ import annotations

from collections.abc import Sequence

import click

from modulm.cli.arguments import TakesFlags
from modulm.config.schema.engine import GROUPS
from modulm.config.schema.flags import Flag, Kind, flags_of, suggest

__all__ = ["print_help", "write_flag", "write_group", "write_overview", "write_topic"]

_COMMON = (
    "model", "dtype", "max_model_len", "quantization", "tokenizer", "served_model_name",
    "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "enable_prefix_caching", "cpu_threads", "attention_backend", "seed",
    "host", "port", "api_key", "chat_template", "enable_auto_tool_choice", "tool_call_parser",
    "reasoning_parser",
)  # fmt: skip


def print_help(shown: Sequence[str], ctx: click.Context, args: list[str]) -> None:
    """Answer `--help=TOPIC` about the groups `shown` and end; else do nothing."""
    before = args[: args.index("--")] if "--" in args else args
    topics = [word.partition("=")[2] for word in before if word.startswith("--help=")]
    if not topics:
        return
    formatter = ctx.make_formatter()
    write_topic(formatter, shown, topics[-1], ctx)
    click.echo(formatter.getvalue().rstrip("\n"))
    ctx.exit()


def write_topic(
    formatter: click.HelpFormatter, shown: Sequence[str], topic: str, ctx: click.Context
) -> None:
    """The help of `all`, a group, a flag, or every flag whose name holds the word.

    Raises click.UsageError for a topic that fits nothing.
    """
    titles = {_title(name).lower(): name for name in shown}
    if topic.lower() == "all":
        for name in shown:
            write_group(formatter, name)
        return
    if topic.lower() in titles:
        write_group(formatter, titles[topic.lower()])
        return
    word = topic.lstrip("-").replace("-", "_").lower()
    flags = [spec for name in shown for spec in flags_of(GROUPS[name]) if spec.own]
    exact = [spec for spec in flags if spec.name == word]
    found = exact or [spec for spec in flags if word in spec.name]
    if not found:
        known = [*titles, *(spec.name for spec in flags)]
        raise click.UsageError(f"no flag or group called {topic!r}{suggest(word, known)}", ctx)
    with formatter.section("Flags"):
        formatter.write_dl([write_flag(spec) for spec in found])


def write_group(formatter: click.HelpFormatter, name: str) -> None:
    """All flags of one group."""
    with formatter.section(f"{_title(name)}: {_summary(name)}"):
        formatter.write_dl([write_flag(spec) for spec in flags_of(GROUPS[name]) if spec.own])


def write_overview(formatter: click.HelpFormatter, command: TakesFlags) -> None:
    """The flags that most users need, and where the others are."""
    shown = [name for name in GROUPS if command.server or name != "frontend"]
    flags = {spec.name: spec for name in shown for spec in flags_of(GROUPS[name])}
    with formatter.section("Flags used most"):
        formatter.write_dl([write_flag(flags[name]) for name in _COMMON if name in flags])
    with formatter.section("Groups of flags"):
        formatter.write_dl([(_title(name), _summary(name)) for name in shown])
    with formatter.section("More help"):
        formatter.write_dl(
            [
                ("--help=GROUP", "the flags of a group, e.g. --help=CacheConfig"),
                ("--help=FLAG", "flags by a word in their name, e.g. --help=max-model-len"),
                ("--help=all", "every flag"),
                ("--config FILE", "read flags from a YAML file; the command line wins"),
            ]
        )


def write_flag(spec: Flag) -> tuple[str, str]:
    """One flag as a row: its names, and what it does, its unit, default and state."""
    names = ", ".join((spec.option, *spec.aliases))
    if spec.base == "bool":
        names += ", --no-" + spec.option.removeprefix("--")
    remarks = [spec.help]
    if spec.choices and spec.kind is None:
        remarks.append(f"One of {', '.join(spec.choices)}.")
    if spec.kind is not None:
        remarks.append(f"Installed: {_installed(spec)}.")
    if spec.unit:
        remarks.append(f"Unit: {spec.unit}.")
    if spec.default not in (None, "", (), {}) and spec.default is not False:
        remarks.append(f"Default: {spec.default}.")
    if spec.deprecated:
        remarks.append(f"Deprecated: {spec.deprecated}.")
    if spec.state.kind is not Kind.WORKS:
        remarks.append(f"[{spec.state.kind.value}: {spec.state.reason}]")
    return names, " ".join(remarks)


def _installed(spec: Flag) -> str:
    from modulm.plugins import manager

    names = {declared.name for declared in manager.current().names(str(spec.kind))}
    return ", ".join([*spec.choices, *sorted(names)]) or "none"


def _title(name: str) -> str:
    title: str = GROUPS[name].TITLE  # type: ignore[attr-defined]
    return title


def _summary(name: str) -> str:
    return (GROUPS[name].__doc__ or "").split("\n")[0].rstrip(".")
