"""The process's environment; no other module reads it."""

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
    """All variables, as they are now."""
    return os.environ


def plugin_selection() -> str:
    """The allow and deny list of `MODULM_PLUGINS`, before any flag is read."""
    return os.environ.get("MODULM_PLUGINS", "")


def isolated() -> dict[str, str]:
    """The variables for a Python process of ours: its path is without the working directory.

    An empty item of PYTHONPATH, as a colon at its end leaves, would stand for that directory.
    """
    items = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, items))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


@contextmanager
def variables_for_library(values: Mapping[str, str]) -> Iterator[None]:
    """Variables by which alone a library takes its settings; as they were, afterwards."""
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
    """The key that `chat` and `complete` send: MODULM_API_KEY (its first), else OPENAI_API_KEY."""
    own = os.environ.get("MODULM_API_KEY", "").split(",")[0].strip()
    return own or os.environ.get("OPENAI_API_KEY") or None


def reported_environment() -> dict[str, str]:
    """The variables that a bug report needs, secrets masked."""
    names = sorted(name for name in os.environ if name.startswith(_REPORTED))
    return {name: _masked(name, os.environ[name]) for name in names}


def _masked(name: str, value: str) -> str:
    return "***" if _any_in(_SECRET, name) and value else value


def _any_in(words: Iterable[str], name: str) -> bool:
    return any(word in name for word in words)
