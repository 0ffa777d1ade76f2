"""Converts errors to those that vLLM scripts expect: ValueError for invalid arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modulm.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    PluginError,
    RequestError,
    UnsupportedError,
)

__all__ = ["EngineDeadError", "as_vllm", "refuse"]


class EngineDeadError(Exception):
    """The engine has died."""


@contextmanager
def as_vllm() -> Iterator[None]:
    """Convert modulm's errors to vLLM's, with the original as the cause."""
    try:
        yield
    except (RequestError, ConfigError, CheckpointError, UnsupportedError, PluginError) as error:
        raise ValueError(str(error)) from error
    except EngineDead as error:
        raise EngineDeadError(str(error)) from error


def refuse(**arguments: object) -> None:
    """Raise ValueError for unsupported arguments that are not None."""
    for name, value in arguments.items():
        if value is not None and value != {}:
            raise ValueError(f"{name}: not supported by modulm; leave it out")
