"""EngineArgs and the parser of arguments that scripts build on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from attrs import evolve

from modulm.config.schema.catalog import catalog
from modulm.config.sources import keywords, read_yaml
from modulm.contracts.flags import Flag, suggest
from modulm.errors import ConfigError
from modulm_cli.arguments import Shapes, normalize
from modulm_vllm.environment import from_environment
from modulm_vllm.failures import as_vllm

__all__ = ["AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser", "flags_for"]

#: vLLM's older way to say what a model is run for -> ours.
_TASKS = {
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling"},
    "embedding": {"runner": "pooling"},
    "classify": {"runner": "pooling"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
}


def flags_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as vLLM takes them, as modulm takes them; with what VLLM_* variables say."""
    told = from_environment()
    unset = {*catalog().tables, *told}
    said = {name: value for name, value in given.items() if value is not None or name not in unset}
    flags = {**told, **said}
    task = flags.pop("task", None)
    if task is not None and task != "auto":
        if task not in _TASKS:
            raise ValueError(f"task {task!r} is none of {', '.join(_TASKS)}")
        flags = {**_TASKS[task], **{k: v for k, v in flags.items() if v not in (None, "auto")}}
    if isinstance(flags.get("compilation_config"), int):
        flags["compilation_config"] = {"level": flags["compilation_config"]}
    return flags


def _flags() -> dict[str, Flag]:
    """The flags of an engine, those of vLLM that nothing here reads among them."""
    known = catalog()
    own = {f.name: f for group in known.groups if not group.cls.server for f in group.flags}
    own = {name: spec for name, spec in own.items() if spec.own and name.isidentifier()}
    others = {spec.name: spec for spec in known.elsewhere() if spec.name.isidentifier()}
    return {**own, **others}


def _tables() -> list[str]:
    """Flags that fill a whole group."""
    return [name for name, group in catalog().tables.items() if not group.cls.server]


class _Arguments:
    """The arguments of an engine: every flag, with underscores. Raises TypeError for others."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser an option for every flag of an engine."""
        for spec in _flags().values():
            _add(parser, spec)
        for name in _tables():
            parser.add_argument(_option(name), dest=name, type=json.loads, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments of what a parser found; other options are not looked at."""
        names = {found.name for found in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: value for key, value in vars(args).items() if key in names})

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, as keywords."""
        found = {}
        for described in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, described.name)
            if value != _standard(described):
                found[described.name] = value
        return found

    def create_engine_config(self, *_: object, **__: object) -> Any:
        """modulm's configuration (`modulm.EngineConfig`). Raises ValueError that names a flag."""
        with as_vllm():
            return keywords(**{"model": "demo", **flags_for(self.given())}).config


_HOME = "vllm.engine.arg_utils"


def _made(name: str) -> type[Any]:
    """A dataclass with a field for every flag, as `dataclasses.asdict` and editors of arguments
    want it.
    """
    fields: list[Any] = [("model", Any, "demo")]
    specs = (spec for spec in _flags().values() if spec.name != "model")
    fields += [(spec.name, Any, _default(spec)) for spec in specs]
    fields += [(table, Any, None) for table in _tables()]
    namespace = {"__doc__": _Arguments.__doc__, "__init__": _begin, "__module__": _HOME}
    return dataclasses.make_dataclass(
        name, fields, bases=(_Arguments,), namespace=namespace, init=False
    )


def _begin(self: Any, *positional: Any, **given: Any) -> None:
    """The constructor of both classes."""
    known = [found.name for found in dataclasses.fields(self)]
    given |= dict(zip(known, positional, strict=False))
    for wrong in (key for key in given if key not in known):
        raise TypeError(
            f"{type(self).__name__} has no argument {wrong!r}{suggest(wrong, known)}; vLLM's "
            "documentation may describe another version"
        )
    for described in dataclasses.fields(self):
        name = described.name
        setattr(self, name, given[name] if name in given else _standard(described))


def _standard(described: dataclasses.Field[Any]) -> Any:
    """What a field has if nobody says anything."""
    factory = described.default_factory
    return described.default if factory is dataclasses.MISSING else factory()


def _default(spec: Flag) -> Any:
    if isinstance(spec.default, dict | list):
        return dataclasses.field(default_factory=lambda: type(spec.default)(spec.default))
    return spec.default


EngineArgs = _made("EngineArgs")
AsyncEngineArgs = _made("AsyncEngineArgs")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add(parser: argparse.ArgumentParser, spec: Flag) -> None:
    names = [_option(spec.name), *(n for n in spec.aliases if n not in parser.prefix_chars)]
    taken = parser._option_string_actions  # argparse has no other way to ask
    names = [name for name in names if name not in taken]
    if not names:
        return
    told: dict[str, Any] = {"dest": spec.name, "default": spec.default, "help": _percent(spec.help)}
    if spec.is_switch:
        told["action"] = argparse.BooleanOptionalAction
    elif spec.is_list:
        told["nargs"] = "+"
    elif spec.is_table:
        told["type"] = json.loads
    else:
        told["type"] = _reader(spec)
    parser.add_argument(*names, **told)


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _reader(spec: Flag) -> Any:
    """The type of an option, as argparse wants it."""
    kinds = spec.kinds
    if kinds[0] in (int, float) and spec.parse is None and len(kinds) == 1:
        return lambda text: None if text == "None" else kinds[0](text)
    return str


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse as vLLM's programs have it: underscores or dashes, `--config FILE`, `--table.key v`.

    An option that is given in a YAML file and on the command line has the latter's value.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        settings.pop("add_json_tip", None)
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        try:
            words, _ = normalize(self._with_file(words), self._shapes())
        except ConfigError as error:
            self.error(str(error))
        found: tuple[argparse.Namespace, list[str]] = super().parse_known_args(words, namespace)
        return found

    def _with_file(self, words: list[str]) -> list[str]:
        """The words with those of `--config FILE` before them."""
        if "--config" not in words or "--config" in self._option_string_actions:
            return words
        place = words.index("--config")
        if place + 1 >= len(words):
            self.error("--config needs a file")
        table = read_yaml(words[place + 1])
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
        return [*read, *words[:place], *words[place + 2 :]]

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
    """Options that are spelt with underscores keep them, whichever way they are typed."""

    def __init__(self, spelt: set[str], shorts: Mapping[str, str]) -> None:
        super().__init__(shorts)
        self._dashed = {name.replace("_", "-"): name for name in spelt}

    def get(self, name: str, default: Any = None) -> Any:
        return self._dashed.get(name.replace("_", "-"), super().get(name, default))
