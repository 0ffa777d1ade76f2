"""Where modules and names of the last release are now, for plugins that were written against it."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from modulm.plugins.index import to_install

__all__ = ["moved", "new_home", "public_name"]

_MISSING = re.compile(r"No module named '([\w.]+)'|cannot import name '(\w+)' from '([\w.]+)'")


@cache
def moved() -> dict[str, str]:
    """Dotted names of the last release and what they are called now, from `moved.txt`."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def new_home(error: BaseException) -> str:
    """What to say after a failed import of something that has moved; else nothing."""
    found = _MISSING.match(str(error)) if isinstance(error, ImportError) else None
    if found is None:
        return ""
    module, name, source = found.groups()
    for old in (module or f"{source}.{name}", source):
        if old in moved():
            return f"; {old} is now {moved()[old]}"
    return ""


def public_name(package: str, name: str, asked: str) -> Any:
    """A public name of a distribution beside the core, for the module that is `asked` for it.

    Raises AttributeError if there is none, ImportError that says what to install.
    """
    missing = AttributeError(f"module {asked!r} has no attribute {name!r}")
    if name.startswith("__"):
        raise missing
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        distribution = package.replace("_", "-")
        raise ImportError(f"{name} needs {distribution}{to_install(distribution)}") from error
    if name not in module.__all__:
        raise missing
    return getattr(module, name)
