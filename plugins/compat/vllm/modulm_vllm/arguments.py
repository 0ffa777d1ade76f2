"""EngineArgs, and vLLM's argument parser."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from attrs import evolve

from modulm.config.schema.catalog import catalog
from modulm.config.sources import keywords
from modulm.contracts.flags import Flag, suggest
from modulm.errors import ConfigError
from modulm_cli.arguments import Shapes, normalize
from modulm_cli.yaml_file import read_yaml
from modulm_vllm.environment import from_environment, log_notes
from modulm_vllm.failures import as_vllm

__all__ = ["AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser", "flags_for"]

#: vLLM's older `task` -> modulm's flags.
_TASKS = {
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling"},
    "embedding": {"runner": "pooling"},
    "classify": {"runner": "pooling"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
}


def flags_for(flags_given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert vLLM's keywords, and VLLM_* variables, to modulm's flags."""
    environment = from_environment()
    log_notes()
    unset = {*catalog().tables, *environment}
    explicit = {
        name: value for name, value in flags_given.items() if value is not None or name not in unset
    }
    flags = {**environment, **explicit}
    task = flags.pop("task", None)
    if task is not None and task != "auto":
        if task not in _TASKS:
            raise ValueError(f"task {task!r} is not one of {', '.join(_TASKS)}")
        flags = {**_TASKS[task], **{k: v for k, v in flags.items() if v not in (None, "auto")}}
    if isinstance(flags.get("compilation_config"), int):
        flags["compilation_config"] = {"level": flags["compilation_config"]}
    return flags


def _flags() -> dict[str, Flag]:
    """The flags of an engine, including vLLM's flags that modulm does not read."""
    known = catalog()
    engine_flags = {
        f.name: f for group in known.groups if not group.cls.server for f in group.flags
    }
    engine_flags = {
        name: spec for name, spec in engine_flags.items() if not spec.nested and name.isidentifier()
    }
    others = {spec.name: spec for spec in known.elsewhere() if spec.name.isidentifier()}
    return {**engine_flags, **others}


def _tables() -> list[str]:
    """Flags that fill a whole group."""
    return [name for name, group in catalog().tables.items() if not group.cls.server]


class _Arguments:
    """The arguments of an engine: every flag, with underscores. Raises TypeError for others."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for every flag of an engine to a parser."""
        for spec in _flags().values():
            _add(parser, spec)
        for name in _tables():
            parser.add_argument(_option(name), dest=name, type=json.loads, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Create the arguments from a parser's result. Other options are ignored."""
        names = {described.name for described in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: value for key, value in vars(args).items() if key in names})

    def changed(self) -> dict[str, Any]:
        """The values that differ from the defaults, as keywords."""
        values = {}
        for described in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, described.name)
            if value != _default_value(described):
                values[described.name] = value
        return values

    def create_engine_config(self, *_: object, **__: object) -> Any:
        """modulm's configuration (`modulm.EngineConfig`). Raises ValueError that names a flag."""
        with as_vllm():
            return keywords(**{"model": "demo", **flags_for(self.changed())}).config


_HOME = "vllm.engine.arg_utils"


def _make_class(name: str) -> type[Any]:
    """Create a dataclass with a field for every flag, for `dataclasses.asdict` and the like."""
    fields: list[Any] = [("model", Any, "demo")]
    specs = (spec for spec in _flags().values() if spec.name != "model")
    fields += [(spec.name, Any, _default(spec)) for spec in specs]
    fields += [(table, Any, None) for table in _tables()]
    namespace = {"__doc__": _Arguments.__doc__, "__init__": _init, "__module__": _HOME}
    return dataclasses.make_dataclass(
        name, fields, bases=(_Arguments,), namespace=namespace, init=False
    )


def _init(self: Any, *positional: Any, **values: Any) -> None:
    """The constructor of both classes."""
    known = [described.name for described in dataclasses.fields(self)]
    values |= dict(zip(known, positional, strict=False))
    for wrong in (key for key in values if key not in known):
        raise TypeError(
            f"{type(self).__name__} has no argument {wrong!r}{suggest(wrong, known)}; vLLM's "
            "documentation may describe another version"
        )
    for described in dataclasses.fields(self):
        name = described.name
        setattr(self, name, values[name] if name in values else _default_value(described))


def _default_value(described: dataclasses.Field[Any]) -> Any:
    """The default value of a field."""
    factory = described.default_factory
    return described.default if factory is dataclasses.MISSING else factory()


def _default(spec: Flag) -> Any:
    if isinstance(spec.default, dict | list):
        return dataclasses.field(default_factory=lambda: type(spec.default)(spec.default))
    return spec.default


EngineArgs = _make_class("EngineArgs")
AsyncEngineArgs = _make_class("AsyncEngineArgs")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add(parser: argparse.ArgumentParser, spec: Flag) -> None:
    names = [_option(spec.name), *(n for n in spec.aliases if n not in parser.prefix_chars)]
    used = parser._option_string_actions  # argparse has no public API for this
    names = [name for name in names if name not in used]
    if not names:
        return
    settings: dict[str, Any] = {
        "dest": spec.name,
        "default": spec.default,
        "help": _percent(spec.help),
    }
    if spec.is_switch:
        settings["action"] = argparse.BooleanOptionalAction
    elif spec.is_list:
        settings["nargs"] = "+"
    elif spec.is_table:
        settings["type"] = json.loads
    else:
        settings["type"] = _reader(spec)
    parser.add_argument(*names, **settings)


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _reader(spec: Flag) -> Any:
    """The argparse type of an option."""
    kinds = spec.kinds
    if kinds[0] in (int, float) and spec.parse is None and len(kinds) == 1:
        return lambda text: None if text == "None" else kinds[0](text)
    return str


class FlexibleArgumentParser(argparse.ArgumentParser):
    """vLLM's argument parser: underscores or dashes, `--config FILE`, `--table.key value`.

    The command line overrides the YAML file.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        settings.pop("add_json_tip", None)
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            arguments, _ = normalize(self._with_file(arguments), self._shapes())
        except ConfigError as error:
            self.error(str(error))
        parsed: tuple[argparse.Namespace, list[str]] = super().parse_known_args(
            arguments, namespace
        )
        return parsed

    def _with_file(self, arguments: list[str]) -> list[str]:
        """Insert the arguments of `--config FILE` before the others."""
        if "--config" not in arguments or "--config" in self._option_string_actions:
            return arguments
        index = arguments.index("--config")
        if index + 1 >= len(arguments):
            self.error("--config needs a file")
        table = read_yaml(arguments[index + 1])
        read: list[str] = []
        for key, value in table.items():
            if value is True:
                read.append(_option(key))
            elif value is False:
                read.append("--no-" + key.replace("_", "-"))
            elif isinstance(value, list):
                read += [_option(key), *map(str, value)]
            elif value is not None:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                read += [_option(key), text]
        return [*read, *arguments[:index], *arguments[index + 2 :]]

    def _shapes(self) -> Shapes:
        actions = {n: a for n, a in self._option_string_actions.items() if n.startswith("--")}
        spelt = {name for name in actions if "_" in name}
        shapes = Shapes(
            tables=frozenset(name for name, action in actions.items() if action.type is json.loads),
            lists=frozenset(),
            takes_value=lambda name: name in actions and actions[name].nargs != 0,
            shorts={name: name for name in spelt},
            names=frozenset(self._option_string_actions),
        )
        return evolve(shapes, shorts=_Spelt(spelt, shapes.shorts))


class _Spelt(dict[str, str]):
    """Keeps the underscores of options that are declared with underscores."""

    def __init__(self, spelt: set[str], shorts: Mapping[str, str]) -> None:
        super().__init__(shorts)
        self._dashed = {name.replace("_", "-"): name for name in spelt}

    def get(self, name: str, default: Any = None) -> Any:
        return self._dashed.get(name.replace("_", "-"), super().get(name, default))
