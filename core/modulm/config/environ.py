"""Environment variables; no other module reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["isolated", "plugin_selection", "variables", "variables_for_library"]


def variables() -> Mapping[str, str]:
    """Return a snapshot of all variables."""
    return os.environ


def plugin_selection() -> str:
    """Return the allow and deny list in `MODULM_PLUGINS`, which is needed before flags are
    parsed.
    """
    return os.environ.get("MODULM_PLUGINS", "")


def isolated() -> dict[str, str]:
    """Return the variables for a Python subprocess whose path excludes the working directory.

    An empty entry of PYTHONPATH, for example after a trailing colon, stands for the working
    directory.
    """
    items = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, items))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


@contextmanager
def variables_for_library(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a library that has no other way to take settings, and restore them
    afterwards.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
