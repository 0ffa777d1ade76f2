"""Checks `--plugins-lock` before anything of a third party is imported, flag groups included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modulm.config.environ import variables

__all__ = ["check_lock"]

_FLAG, _VARIABLE = "plugins_lock", "MODULM_PLUGINS_LOCK"


def check_lock(arguments: Sequence[str]) -> None:
    """Raise ConfigError if the installed packages differ from the lock that arguments, the file of
    `--config` or the environment require.
    """
    path = _lock_path(arguments)
    if path:
        from modulm_plugin_lock import check_packages

        check_packages(path)


def _lock_path(arguments: Sequence[str]) -> str | None:
    """Return the lock's path without parsing flags, which would import their groups."""
    options = {name: _value(arguments, name) for name in (_FLAG, "config")}
    if options[_FLAG] is not None:
        return options[_FLAG]
    file = options["config"]
    if file is not None and Path(file).is_file():
        import yaml

        try:
            table = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            return None  # reported with the other flags
        keys = (
            {str(k).replace("-", "_"): v for k, v in table.items()}
            if isinstance(table, dict)
            else {}
        )
        if isinstance(keys.get(_FLAG), str):
            return str(keys[_FLAG])
    return variables().get(_VARIABLE)


def _value(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of `--name` with dashes or underscores, or None."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        option, equals, after = argument.partition("=")
        if option.startswith("--") and option[2:].replace("-", "_") == name:
            value = after if equals else next(iter(arguments[index + 1 :]), None)
    return value
