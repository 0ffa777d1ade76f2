"""Builds Click options from the flag schema, and a configuration from their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from attrs import evolve
from click.shell_completion import CompletionItem

from modulm.config.schema.catalog import Group, catalog
from modulm.config.sources import Draft, Source, draft, environment
from modulm.contracts.flags import Flag
from modulm.errors import ConfigError
from modulm_cli.arguments import Shapes, TakesFlags, normalize
from modulm_cli.flag_help import print_help
from modulm_cli.plugin_lock import check_lock
from modulm_cli.yaml_file import read_yaml

__all__ = [
    "FlagOption", "Names", "WrongFlags", "draft_or_errors", "groups_of", "make_options",
    "option_of", "parse_flags",
]  # fmt: skip

#: Errors of flags that are shown at once.
_MOST_ERRORS = 20


class Names(click.types.StringParamType):
    """The type of a flag's value. Shell completion offers its choices and plugin names."""

    name = "text"

    def __init__(self, spec: Flag) -> None:
        self.spec = spec

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The placeholder after the option in help."""
        if self.spec.choices and self.spec.kind is None:
            return "[" + "|".join(self.spec.choices) + "]"
        return "JSON" if self.spec.is_table else self.spec.name.upper()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The choices that start with `incomplete`."""
        known = list(self.spec.choices)
        if self.spec.kind is not None:
            from modulm.plugins import manager

            known += [declared.name for declared in manager.current().names(self.spec.kind)]
        if not known and self.spec.unit == "path":
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in known if name.startswith(incomplete)]


class FlagOption(click.Option):
    """The Click option of one flag of the schema."""

    def __init__(self, spec: Flag, names: Sequence[str], **attributes: Any) -> None:
        super().__init__([*names, spec.name], help=spec.help, default=None, **attributes)
        self.spec = spec


def option_of(spec: Flag, used_names: frozenset[str] = frozenset()) -> FlagOption:
    """Build the option of one flag, without aliases that the command uses itself."""
    aliases = [alias for alias in spec.aliases if alias not in used_names]
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
    """Build `--config`, one option per flag, and one per group that has a table."""
    command_names = frozenset(
        name for parameter in command.params for name in (*parameter.opts, parameter.name or "")
    )
    groups = groups_of(command)
    flag_options: list[click.Option] = [
        option_of(spec, command_names)
        for group in groups
        for spec in group.flags
        if not spec.nested and spec.name not in command.fixed and spec.option not in command_names
    ]
    flag_options += [_table_option(group.cls.table, group) for group in groups if group.cls.table]
    config = click.Option(["--config"], metavar="FILE", help="YAML file with flags.")
    return [config, *flag_options]


def groups_of(command: TakesFlags) -> list[Group]:
    """The groups of flags that a command takes."""
    return [group for group in catalog().groups if command.server or not group.cls.server]


def parse_flags(
    command: TakesFlags,
    ctx: click.Context,
    args: list[str],
    parse: Callable[[click.Context, list[str]], list[str]],
) -> list[str]:
    """Parse with `parse`, then replace all flag values by one `draft`. Raises click.UsageError."""
    try:
        check_lock(args)
    except ConfigError as error:
        # without the context: a usage line lists options, for which groups of flags are imported
        raise click.UsageError(_message(error)) from error
    print_help(groups_of(command), ctx, args)
    unknown: list[click.NoSuchOption] = []
    try:
        arguments, known = normalize(args, _shapes(command, ctx))
        file = _file(command, ctx, arguments)
        rest = _parse_known(parse, ctx, arguments, unknown)
        sources = _sources(command, ctx.params, known, file)
        ctx.params["draft"] = merged = draft_or_errors(sources)
        if not unknown:
            _use_plugins(merged)
    except WrongFlags as error:
        messages = [other.format_message() for other in unknown] + error.messages
        raise click.UsageError("\n".join(messages), ctx) from error
    except ConfigError as error:
        raise click.UsageError(_message(error), ctx) from error
    if unknown:
        raise click.UsageError("\n".join(other.format_message() for other in unknown), ctx)
    return rest


def _parse_known(
    parse: Callable[[click.Context, list[str]], list[str]],
    ctx: click.Context,
    arguments: Sequence[str],
    unknown: list[click.NoSuchOption],
) -> list[str]:
    """Parse without the options that do not exist, and collect their errors."""
    left = list(arguments)
    while True:
        try:
            return parse(ctx, left[:])
        except click.NoSuchOption as error:
            at = [i for i, a in enumerate(left) if a.partition("=")[0] == error.option_name]
            if not at or len(unknown) == _MOST_ERRORS:
                raise
            unknown.append(error)
            after = left[at[0] + 1 : at[0] + 2]
            has_value = "=" not in left[at[0]] and after and not after[0].startswith("-")
            del left[at[0] : at[0] + (2 if has_value else 1)]


class WrongFlags(ConfigError):
    """Several flags are wrong."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__(errors[0].field, errors[0].message)
        self.messages = [_message(error) for error in errors]


def draft_or_errors(sources: Sequence[Source]) -> Draft:
    """Merge sources into a configuration. Raises WrongFlags, which has the errors of all flags."""
    errors: list[ConfigError] = []
    while True:
        try:
            merged = draft(*sources)
        except ConfigError as error:
            errors.append(error)
            shorter = [_without(source, error.field) for source in sources]
            if shorter == sources or len(errors) == _MOST_ERRORS:
                raise WrongFlags(errors) from None
            sources = shorter
            continue
        if errors:
            raise WrongFlags(errors)
        return merged


def _without(source: Source, field: str) -> Source:
    """The source without the flag, or without the table that the flag is in."""
    canonical = catalog().canonical
    top = field.partition(".")[0]
    wrong = {field, top, canonical(field) or field, canonical(top) or top}
    values = {
        key: value for key, value in source.values.items() if not wrong & {key, canonical(key)}
    }
    return evolve(source, values=values)


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


def _file(command: TakesFlags, ctx: click.Context, arguments: Sequence[str]) -> Source | None:
    """Read the flags of `--config FILE`. Keys of the command's own options become defaults."""
    path = _option_value(arguments, "--config")
    if path is None:
        return None
    command_options = {parameter.name for parameter in command.params if parameter.name}
    command_options -= {"model_tag", "model_tags"}
    table = read_yaml(path)
    ctx.default_map = {key: value for key, value in table.items() if key in command_options}
    return Source(
        f"file {path}", {key: value for key, value in table.items() if key not in command_options}
    )


def _sources(
    command: TakesFlags, params: dict[str, Any], known: Mapping[str, Any], file: Source | None
) -> list[Source]:
    """Take the flag values out of `params`, and list them with `known` flags of other packages, the
    file and the environment.
    """
    params.pop("config", None)
    values: dict[str, Any] = dict(known)
    for option in command.flag_options:
        value = params.pop(str(option.name), None)
        if value is not None and value != ():
            values[str(option.name)] = _one(value)
    model = params.get("model_tag") or next(iter(params.get("model_tags") or ()), None)
    if model:
        if values.get("model", model) != model:
            raise ConfigError("model", "is set twice: as an argument and as an option")
        values["model"] = model
    labels = {name: "--" + name.replace("_", "-") for name in values}
    return [Source("command line", values, labels), *([file] if file else []), environment()]


def _one(value: Any) -> Any:
    """Unwrap a list option whose only value is a JSON list, for the schema to parse."""
    single = isinstance(value, tuple) and len(value) == 1 and value[0].lstrip().startswith("[")
    return value[0] if single else value


def _option_value(arguments: Sequence[str], option: str) -> str | None:
    value = None
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == option and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(option + "="):
            value = argument.partition("=")[2]
    return value


def _use_plugins(flags: Draft) -> None:
    """Apply `--plugins`, run files that register parsers, and check driver names from flags.

    Raises ConfigError for a name that no plugin provides, before a model is loaded.
    """
    from modulm_isolation.process_state import watch_imports

    watch_imports()
    config = flags.config
    files = {spec.name: value for spec, value in config.values() if spec.registers and value}
    driver_flags = [
        spec.name for spec, _ in config.values() if spec.kind and spec.name in flags.origins
    ]
    from modulm_isolation.flags import IsolationConfig
    from modulm_plugin_lock.flags import PluginLockConfig

    lock = config.group(PluginLockConfig).plugins_lock
    isolate = config.group(IsolationConfig).isolate
    named = config.device.plugins or isolate
    if not (named or config.device.plugin_config or driver_flags or files or lock):
        return
    from modulm.config.resolve import check_names, check_plugin_config
    from modulm.plugins import PluginManager, configure, current
    from modulm.plugins.files import load_file
    from modulm.plugins.selection import Selection

    if named:
        if isolate:
            from modulm_isolation import check_isolation

            check_isolation(isolate, current())
        selected = config.device.plugins or (str(current().selection),)
        terms = ",".join([*selected, *(f"~{term}" for term in isolate)])
        PluginManager(Selection.parse(terms)).check_selection()
        configure(terms)
    if lock is not None:
        from modulm_plugin_lock import check_config

        check_config(lock, config)
    for flag, path in files.items():
        load_file(flag, path)
    check_names(config, current(), driver_flags)
    check_plugin_config(config, current())


def _message(error: ConfigError) -> str:
    return f"--{error.field.replace('_', '-')}: {error.message}"
