"""Environment variables; no other module reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "client_key",
    "isolated",
    "plugin_selection",
    "reported_environment",
    "variables",
    "variables_for_library",
]

_REPORTED = ("MODULM_", "HF_", "OMP_", "KMP_", "MKL_", "TORCH_", "PYTORCH_", "PYTHON", "LD_PRELOAD")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


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


def client_key() -> str | None:
    """Return the API key for `chat` and `complete`: the first of MODULM_API_KEY, else
    OPENAI_API_KEY.
    """
    first = os.environ.get("MODULM_API_KEY", "").split(",")[0].strip()
    return first or os.environ.get("OPENAI_API_KEY") or None


def reported_environment() -> dict[str, str]:
    """Return the variables for a bug report, with secrets masked."""
    names = sorted(name for name in os.environ if name.startswith(_REPORTED))
    return {name: _masked(name, os.environ[name]) for name in names}


def _masked(name: str, value: str) -> str:
    return "***" if _any_in(_SECRET, name) and value else value


def _any_in(parts: Iterable[str], name: str) -> bool:
    return any(word in name for word in parts)
