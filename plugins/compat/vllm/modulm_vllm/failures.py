"""Errors as scripts for vLLM expect them: a ValueError for what the caller can put right."""

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
    """The engine cannot go on."""


@contextmanager
def as_vllm() -> Iterator[None]:
    """Errors of modulm as vLLM raises them, the cause chained."""
    try:
        yield
    except (RequestError, ConfigError, CheckpointError, UnsupportedError, PluginError) as error:
        raise ValueError(str(error)) from error
    except EngineDead as error:
        raise EngineDeadError(str(error)) from error


def refuse(**arguments: object) -> None:
    """Raise ValueError for an argument that asks for what is not here; None asks for nothing."""
    for name, value in arguments.items():
        if value is not None and value != {}:
            raise ValueError(f"{name}: not supported by modulm; leave it out")
