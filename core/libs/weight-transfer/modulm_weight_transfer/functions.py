"""What `EngineWeights` calls in each worker. Refusals are answers: errors of calls lose their type
between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from modulm.errors import ModulmError, RequestError, UnsupportedError
from modulm_weight_transfer.receiver import WeightReceiver, receiver_of

__all__ = [
    "cancel",
    "check",
    "complete",
    "connect",
    "disconnect",
    "drop",
    "finish",
    "receive",
    "start",
    "value_of",
]

T = TypeVar("T")


def _answers(function: Callable[..., T]) -> Callable[..., list[Any]]:
    @wraps(function)
    def call(*arguments: Any) -> list[Any]:
        try:
            return [None, function(*arguments)]
        except RequestError as error:
            return ["RequestError", error.message, error.param]
        except UnsupportedError as error:
            return ["UnsupportedError", str(error)]

    return call


def value_of(answer: list[Any]) -> Any:
    """What a function has returned, from its answer. Raises what it has refused with."""
    kind, *values = answer
    if kind is None:
        return values[0]
    error: ModulmError = {"RequestError": RequestError}.get(kind, UnsupportedError)(*values)
    raise error


@_answers
def connect(worker: Any, info: Mapping[str, Any]) -> None:
    """See `WeightReceiver.connect`."""
    WeightReceiver.connect(worker, info)


@_answers
def disconnect(worker: Any) -> None:
    """See `WeightReceiver.disconnect`."""
    WeightReceiver.disconnect(worker)


@_answers
def start(worker: Any, partial_update: bool) -> None:
    """See `WeightReceiver.start`."""
    receiver_of(worker).start(partial_update)


@_answers
def check(worker: Any, number: int, info: Mapping[str, Any]) -> bool:
    """See `WeightReceiver.check`."""
    return receiver_of(worker).check(number, info)


@_answers
def drop(worker: Any, number: int) -> None:
    """See `WeightReceiver.drop`."""
    receiver_of(worker).drop(number)


@_answers
def receive(worker: Any) -> None:
    """See `WeightReceiver.receive`."""
    receiver_of(worker).receive()


@_answers
def complete(worker: Any) -> bool:
    """See `WeightReceiver.complete`."""
    return receiver_of(worker).complete()


@_answers
def finish(worker: Any) -> None:
    """See `WeightReceiver.finish`."""
    receiver_of(worker).finish()


@_answers
def cancel(worker: Any) -> None:
    """See `WeightReceiver.cancel`."""
    receiver_of(worker).cancel()
