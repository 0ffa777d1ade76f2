"""Click commands whose options are made from the schema.

A command made with `cls=FlagCommand` takes every engine flag beside its own options; its callback
gets one argument `draft`: the configuration, with the origin of every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import click
from click.shell_completion import CompletionItem

from modulm.cli.arguments import Shapes, normalize
from modulm.cli.flag_help import print_help, write_overview
from modulm.config.schema.engine import GROUPS, TABLES
from modulm.config.schema.flags import Flag, flags_of
from modulm.config.sources import Draft, Source, draft, environment, read_yaml
from modulm.errors import ConfigError

__all__ = ["FlagCommand", "FlagOption", "option_of", "print_notices"]


class Names(click.types.StringParamType):
    """A value as typed; completion offers fixed choices and the names that plugins provide."""

    name = "text"

    def __init__(self, spec: Flag) -> None:
        self.spec = spec

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What stands after the option in help."""
        if self.spec.choices and self.spec.kind is None:
            return "[" + "|".join(self.spec.choices) + "]"
        return "JSON" if self.spec.base == "Mapping[str, Any]" else self.spec.name.upper()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Choices that begin with what is typed."""
        known = list(self.spec.choices)
        if self.spec.kind is not None:
            from modulm.plugins import manager

            known += [declared.name for declared in manager.current().names(self.spec.kind)]
        if not known and self.spec.unit == "path":
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in known if name.startswith(incomplete)]


class FlagOption(click.Option):
    """An option that belongs to one flag of the schema."""

    def __init__(self, spec: Flag, names: Sequence[str], **attributes: Any) -> None:
        super().__init__([*names, spec.name], help=spec.help, default=None, **attributes)
        self.spec = spec


def option_of(spec: Flag, taken: frozenset[str] = frozenset()) -> FlagOption:
    """The option of one flag, without the short names that the command uses itself."""
    aliases = [alias for alias in spec.aliases if alias not in taken and alias != "-O"]
    if spec.base == "bool":
        switch = "--no-" + spec.option.removeprefix("--")
        return FlagOption(spec, [f"{spec.option}/{switch}", *aliases])
    several = spec.base.startswith("tuple")
    extra: dict[str, Any] = {"multiple": True} if several else {}
    if spec.type == "str | bool | None":
        extra = {"is_flag": False, "flag_value": "true"}
    return FlagOption(spec, [spec.option, *aliases], type=Names(spec), **extra)


def _table_option(table: str) -> click.Option:
    group = GROUPS[TABLES[table]].TITLE  # type: ignore[attr-defined]
    name = "--" + table.replace("_", "-")
    short = ["-ac"] if table == "attention_config" else []
    return click.Option([name, *short, table], help=f"{group} as JSON.", metavar="JSON")


class FlagCommand(click.Command):
    """A command that takes the engine's flags. `server` adds those of the HTTP server.

    `fixed` are flags that the command sets itself and does not take.
    """

    def __init__(
        self,
        *arguments: Any,
        server: bool = False,
        fixed: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.fixed = frozenset(fixed)
        self.groups = [name for name in GROUPS if server or name != "frontend"]

    @cached_property
    def flag_options(self) -> list[click.Option]:
        """Options of flags and of whole groups, less those that the command defines itself."""
        own = frozenset(
            name for parameter in self.params for name in (*parameter.opts, parameter.name or "")
        )
        made: list[click.Option] = [
            option_of(spec, own)
            for name in self.groups
            for spec in flags_of(GROUPS[name])
            if spec.own and spec.name not in self.fixed and spec.option not in own
        ]
        made += [_table_option(table) for table, name in TABLES.items() if name in self.groups]
        config = click.Option(["--config"], metavar="FILE", help="YAML file with flags.")
        return [config, *made]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Own options first, then those of the schema."""
        return [*super().get_params(ctx), *self.flag_options]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, then put one `draft` in the place of all flag values."""
        print_help(self, ctx, args)
        try:
            words = normalize(args, self._shapes(ctx))
            file = self._file(ctx, words)
            rest = super().parse_args(ctx, words)
            ctx.params["draft"] = self._draft(ctx.params, file)
        except ConfigError as error:
            raise _usage(error, ctx) from error
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Own options, and how to see the flags: there are hundreds."""
        options = (param for param in self.params if isinstance(param, click.Option))
        own = [record for option in options if (record := option.get_help_record(ctx))]
        if own:
            with formatter.section("Options"):
                formatter.write_dl(own)
        write_overview(formatter, self)

    def _shapes(self, ctx: click.Context) -> Shapes:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        flags = [option for option in options if isinstance(option, FlagOption)]
        tables = {option.spec.option for option in flags if option.spec.base.startswith("Mapping")}
        tables |= {"--" + table.replace("_", "-") for table in TABLES}
        lists = {option.spec.option for option in flags if option.spec.base.startswith("tuple")}
        shorts = {
            alias: option.opts[0]
            for option in options
            for alias in option.opts[1:]
            if not alias.startswith("--")
        }
        valued = {name for option in options if not option.is_flag for name in option.opts}
        optional = {"--hf-token"}
        return Shapes(
            tables=frozenset(tables),
            lists=frozenset(lists),
            takes_value=lambda name: name in valued and name not in optional,
            shorts=shorts,
        )

    def _file(self, ctx: click.Context, words: Sequence[str]) -> Source | None:
        """Flags of `--config FILE`; keys that are the command's own options become its defaults."""
        path = _option_value(words, "--config")
        if path is None:
            return None
        own = {parameter.name for parameter in self.params if parameter.name}
        table = read_yaml(path)
        ctx.default_map = {key: value for key, value in table.items() if key in own}
        flags = {key: value for key, value in table.items() if key not in own}
        if isinstance(ctx.default_map.get("model_tag"), str):
            flags.setdefault("model", ctx.default_map["model_tag"])
        return Source(f"file {path}", flags)

    def _draft(self, params: dict[str, Any], file: Source | None) -> Draft:
        """Take the flag values out of `params` and join them with file and environment."""
        params.pop("config", None)
        given: dict[str, Any] = {}
        for option in self.flag_options:
            value = params.pop(str(option.name), None)
            if value is not None and value != ():
                given[str(option.name)] = _one(value)
        if params.get("model_tag") and "model_tag" not in given:
            given["model"] = params["model_tag"]
        labels = {name: "--" + name.replace("_", "-") for name in given}
        sources = [Source("command line", given, labels)]
        joined = draft(*sources, *([file] if file else []), environment())
        _choose_plugins(joined)
        return joined


def _one(value: Any) -> Any:
    """A list given once as JSON stays that text, so that the schema reads it."""
    single = isinstance(value, tuple) and len(value) == 1 and value[0].lstrip().startswith("[")
    return value[0] if single else value


def _option_value(words: Sequence[str], option: str) -> str | None:
    found = None
    for place, word in enumerate(words):
        if word == "--":
            break
        if word == option and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(option + "="):
            found = word.partition("=")[2]
    return found


def _choose_plugins(joined: Draft) -> None:
    """Make `--plugins` hold for this process."""
    terms = joined.config.device.plugins
    if terms:
        from modulm.plugins import configure

        configure(",".join(terms))


def _usage(error: ConfigError, ctx: click.Context) -> click.UsageError:
    return click.UsageError(f"--{error.field.replace('_', '-')}: {error.message}", ctx)


def print_notices(notices: Sequence[object] | Mapping[str, object]) -> None:
    """One line to stderr for each value that is deprecated or changes nothing."""
    for notice in notices:
        click.echo(f"note: {notice}", err=True)
