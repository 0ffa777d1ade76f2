"""Help for commands with hundreds of flags: an overview, one group, one flag, or all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from modulm.config.schema.catalog import Group, catalog
from modulm.contracts.flags import Flag, Kind, suggest

__all__ = ["print_help", "write_flag", "write_group", "write_overview", "write_topic"]

#: The help topic for vLLM's flags that no installed package reads.
_UNUSED = "elsewhere"


def print_help(groups: Sequence[Group], ctx: click.Context, args: list[str]) -> None:
    """If the arguments have `--help=TOPIC`, print that help and exit."""
    before = args[: args.index("--")] if "--" in args else args
    topics = [word.partition("=")[2] for word in before if word.startswith("--help=")]
    if not topics:
        return
    formatter = ctx.make_formatter()
    write_topic(formatter, groups, topics[-1], ctx)
    click.echo(formatter.getvalue().rstrip("\n"))
    ctx.exit()


def write_topic(
    formatter: click.HelpFormatter, groups: Sequence[Group], topic: str, ctx: click.Context
) -> None:
    """Write the help of `all`, a group, unsupported flags, or all flags that contain a word.

    Raises click.UsageError for an unknown topic.
    """
    titles = {group.cls.title.lower(): group for group in groups}
    lowered = topic.lower()
    if lowered in ("all", _UNUSED) or lowered in titles:
        chosen = groups if lowered == "all" else [titles[lowered]] if lowered in titles else []
        for group in chosen:
            write_group(formatter, group)
        if lowered in ("all", _UNUSED):
            _write_unused(formatter)
        return
    word = lowered.lstrip("-").replace("-", "_")
    flags = [spec for group in groups for spec in group.flags if not spec.nested]
    matches = _matching(word, flags) or _matching(word, catalog().elsewhere())
    if not matches:
        known = [*titles, *(spec.name for spec in flags)]
        raise click.UsageError(f"no flag or group called {topic!r}{suggest(word, known)}", ctx)
    with formatter.section("Flags"):
        formatter.write_dl([write_flag(spec) for spec in matches])


def _matching(word: str, flags: Iterable[Flag]) -> list[Flag]:
    """The flag of that name, or all flags whose names contain the word."""
    containing = [spec for spec in flags if word in spec.name]
    return [spec for spec in containing if spec.name == word] or containing


def _write_unused(formatter: click.HelpFormatter) -> None:
    """Write vLLM's flags that no installed package reads, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for spec in catalog().elsewhere():
        by_reason.setdefault(str(spec.state), []).append(spec.option)
    with formatter.section("Flags of vLLM that no installed package reads"):
        for reason, options in by_reason.items():
            formatter.write_text(f"{', '.join(options)} [{reason}]")


def write_group(formatter: click.HelpFormatter, group: Group) -> None:
    """Write all flags of one group; nothing if it has none."""
    rows = [write_flag(spec) for spec in group.flags if not spec.nested]
    if rows:
        with formatter.section(f"{group.cls.title}: {group.summary}"):
            formatter.write_dl(rows)


def write_overview(formatter: click.HelpFormatter, groups: Sequence[Group]) -> None:
    """Write the most common flags, and how to see the others."""
    common = [spec for group in groups for spec in group.flags if spec.common]
    with formatter.section("Common flags"):
        formatter.write_dl([write_flag(spec) for spec in common])
    with formatter.section("Groups of flags"):
        formatter.write_dl([(group.cls.title, group.summary) for group in groups])
    with formatter.section("More help"):
        formatter.write_dl(
            [
                ("--help=GROUP", "the flags of a group, e.g. --help=CacheConfig"),
                ("--help=FLAG", "flags by a word in their name, e.g. --help=max-model-len"),
                (f"--help={_UNUSED}", "flags of vLLM that no installed package reads, and why"),
                ("--help=all", "every flag"),
                ("--config FILE", "read flags from a YAML file; the command line wins"),
            ]
        )


def write_flag(spec: Flag) -> tuple[str, str]:
    """One flag as a row: (names, description with unit, default and state)."""
    names = ", ".join((spec.option, *spec.aliases))
    if spec.is_switch:
        names += ", --no-" + spec.option.removeprefix("--")
    remarks = [spec.help] if spec.help else []
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
        remarks.append(f"[{spec.state}]")
    return names, " ".join(remarks)


def _installed(spec: Flag) -> str:
    from modulm.plugins import manager

    names = {declared.name for declared in manager.current().names(str(spec.kind))}
    return ", ".join([*spec.choices, *sorted(names)]) or "none"
