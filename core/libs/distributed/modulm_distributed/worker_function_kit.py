"""The contract kit for worker functions.

    from modulm_distributed.worker_function_kit import check_worker_function

    def test_contract():
        check_worker_function(norm, sample={"digits": 2})

A worker with a tiny model runs the function between steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from modulm.engine.worker.worker import Worker
from modulm.plugins import manager
from modulm.testing.executors import tiny_config
from modulm.testing.kit import KitNotRun
from modulm_wire import frames

__all__ = ["check_worker_function"]


def check_worker_function(
    driver: Callable[..., Any], *, sample: Mapping[str, Any] | None = None
) -> None:
    """Run the kit. sample: arguments besides the worker; by default the function's `kit_sample`.

    Raises AssertionError with what was expected, KitNotRun if arguments are missing.
    """
    _check_signature(driver)
    arguments = getattr(driver, "kit_sample", {}) if sample is None else sample
    try:
        inspect.signature(driver).bind(object(), **arguments)
    except TypeError as error:
        raise KitNotRun(f"{error}: pass sample=, the arguments by name") from error
    packed = _packed(arguments, "an argument")
    worker = Worker(tiny_config(), manager.current())
    try:
        _check_call(driver, worker, arguments)
        same = _packed(arguments, "an argument") == packed
        assert same, "the function changes its arguments, which other ranks share"
    finally:
        worker.close()


def _check_signature(driver: Callable[..., Any]) -> None:
    assert callable(driver), f"{driver!r} is not a function"
    assert not isinstance(driver, type), f"{driver!r} is a class, whose objects cannot be sent"
    waits = inspect.iscoroutinefunction(driver) or inspect.isasyncgenfunction(driver)
    assert not waits, f"{driver!r} is a coroutine; workers call it and send what it returns"
    parameters = list(inspect.signature(driver).parameters.values())
    first = parameters and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )  # fmt: skip
    assert first, f"{driver!r} does not take the worker as its first argument"
    module, name = driver.__module__, driver.__qualname__
    try:
        there = attrgetter(name)(sys.modules[module]) is driver
    except (AttributeError, KeyError):
        there = False
    assert there, f"{module}:{name} is not at the top of its module, so no worker can import it"


def _check_call(driver: Callable[..., Any], worker: Worker, arguments: Mapping[str, Any]) -> None:
    before = _state(worker)
    answer = driver(worker, **arguments)
    _packed(answer, "the answer")
    _packed(driver(worker, **arguments), "the second answer")
    assert _state(worker)[1:] == before[1:], (
        "the function changes the worker: its model's mode, torch's default dtype or its gradients"
    )


def _state(worker: Worker) -> tuple[Any, ...]:
    """What a function must leave as it is, apart from weights."""
    model: Any = worker.model
    parameters = list(model.parameters())
    return (
        id(model),
        worker.rank,
        model.training,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        [parameter.grad is None for parameter in parameters],
        [tuple(parameter.shape) for parameter in parameters],
    )


def _packed(value: Any, what: str) -> bytes:
    try:
        return frames.pack("answer", 0, value)
    except Exception as error:
        raise AssertionError(
            f"{what} cannot be sent between processes: {error}. "
            "Use numbers, strings, bytes, lists, dicts and numpy arrays"
        ) from error
