"""Click options made from the schema, and their values made into a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from modulm.config.schema.catalog import Group, catalog
from modulm.config.sources import Draft, Source, draft, environment, read_yaml
from modulm.contracts.flags import Flag
from modulm.errors import ConfigError
from modulm_cli.arguments import Shapes, TakesFlags, normalize
from modulm_cli.flag_help import print_help

__all__ = ["FlagOption", "Names", "groups_of", "make_options", "option_of", "parse_flags"]


class Names(click.types.StringParamType):
    """A value as typed; completion offers fixed choices and the names that plugins provide."""

    name = "text"

    def __init__(self, spec: Flag) -> None:
        self.spec = spec

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What stands after the option in help."""
        if self.spec.choices and self.spec.kind is None:
            return "[" + "|".join(self.spec.choices) + "]"
        return "JSON" if self.spec.is_table else self.spec.name.upper()

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
    aliases = [alias for alias in spec.aliases if alias not in taken]
    if spec.is_switch:
        switch = "--no-" + spec.option.removeprefix("--")
        return FlagOption(spec, [f"{spec.option}/{switch}", *aliases])
    extra: dict[str, Any] = {"multiple": True} if spec.is_list else {}
    if bool in spec.kinds:
        extra = {"is_flag": False, "flag_value": "true"}
    return FlagOption(spec, [spec.option, *aliases], type=Names(spec), **extra)


def _table_option(table: str, group: Group) -> click.Option:
    names = ["--" + table.replace("_", "-"), *group.cls.table_aliases, table]
    return click.Option(names, help=f"{group.cls.title} as JSON.", metavar="JSON")


def make_options(command: TakesFlags) -> list[click.Option]:
    """`--config`, one option per flag and one per group that has a table."""
    own = frozenset(
        name for parameter in command.params for name in (*parameter.opts, parameter.name or "")
    )
    groups = groups_of(command)
    made: list[click.Option] = [
        option_of(spec, own)
        for group in groups
        for spec in group.flags
        if spec.own and spec.name not in command.fixed and spec.option not in own
    ]
    made += [_table_option(group.cls.table, group) for group in groups if group.cls.table]
    config = click.Option(["--config"], metavar="FILE", help="YAML file with flags.")
    return [config, *made]


def groups_of(command: TakesFlags) -> list[Group]:
    """The groups whose flags a command takes."""
    return [group for group in catalog().groups if command.server or not group.cls.server]


def parse_flags(
    command: TakesFlags,
    ctx: click.Context,
    args: list[str],
    parse: Callable[[click.Context, list[str]], list[str]],
) -> list[str]:
    """Parse with `parse`, then put one `draft` in the place of all flag values."""
    print_help(groups_of(command), ctx, args)
    try:
        words, known = normalize(args, _shapes(command, ctx))
        file = _file(command, ctx, words)
        rest = parse(ctx, words)
        ctx.params["draft"] = _draft(command, ctx.params, known, file)
    except ConfigError as error:
        raise _usage(error, ctx) from error
    return rest


def _shapes(command: TakesFlags, ctx: click.Context) -> Shapes:
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    flags = [option for option in options if isinstance(option, FlagOption)]
    tables = {option.spec.option for option in flags if option.spec.is_table}
    tables |= {"--" + table.replace("_", "-") for table in catalog().tables}
    lists = {option.spec.option for option in flags if option.spec.is_list}
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    shorts = {
        alias: option.opts[0]
        for option in options
        for alias in option.opts[1:]
        if not alias.startswith("--")
    }
    optional = {option.opts[0] for option in flags if not option.is_flag and option.flag_value}
    valued = {name for option in options if not option.is_flag for name in option.opts}
    return Shapes(
        tables=frozenset(tables),
        lists=frozenset(lists),
        takes_value=lambda name: name in valued and name not in optional,
        shorts=shorts,
        names=frozenset(names),
        known=catalog().known,
    )


def _file(command: TakesFlags, ctx: click.Context, words: Sequence[str]) -> Source | None:
    """Flags of `--config FILE`; keys that are the command's own options become its defaults."""
    path = _option_value(words, "--config")
    if path is None:
        return None
    own = {parameter.name for parameter in command.params if parameter.name} - {"model_tag"}
    table = read_yaml(path)
    ctx.default_map = {key: value for key, value in table.items() if key in own}
    return Source(f"file {path}", {key: value for key, value in table.items() if key not in own})


def _draft(
    command: TakesFlags, params: dict[str, Any], known: Mapping[str, Any], file: Source | None
) -> Draft:
    """Take the flag values out of `params` and join them with those that no group here has, with
    the file and the environment.
    """
    params.pop("config", None)
    given: dict[str, Any] = dict(known)
    for option in command.flag_options:
        value = params.pop(str(option.name), None)
        if value is not None and value != ():
            given[str(option.name)] = _one(value)
    if params.get("model_tag"):
        if given.get("model", params["model_tag"]) != params["model_tag"]:
            raise ConfigError("model", "is given twice: as an argument and as an option")
        given["model"] = params["model_tag"]
    labels = {name: "--" + name.replace("_", "-") for name in given}
    sources = [Source("command line", given, labels)]
    joined = draft(*sources, *([file] if file else []), environment())
    _use_plugins(joined)
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


def _use_plugins(joined: Draft) -> None:
    """Make `--plugins` hold, run files that register parsers, and check names that were given.

    Raises ConfigError for a name that nothing offers: now, not after a model was loaded.
    """
    config = joined.config
    files = {spec.name: value for spec, value in config.values() if spec.registers and value}
    named = [spec.name for spec, _ in config.values() if spec.kind and spec.name in joined.origins]
    if not (config.device.plugins or config.device.plugin_config or named or files):
        return
    from modulm.config.resolve import check_names, check_plugin_config
    from modulm.plugins import PluginManager, configure, current
    from modulm.plugins.files import load_file
    from modulm.plugins.selection import Selection

    if config.device.plugins:
        terms = ",".join(config.device.plugins)
        PluginManager(Selection.parse(terms)).check_selection()
        configure(terms)
    for flag, path in files.items():
        load_file(flag, path)
    check_names(config, current(), named)
    check_plugin_config(config, current())


def _usage(error: ConfigError, ctx: click.Context) -> click.UsageError:
    return click.UsageError(f"--{error.field.replace('_', '-')}: {error.message}", ctx)
