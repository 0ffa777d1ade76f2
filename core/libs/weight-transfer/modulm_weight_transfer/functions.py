"""Functions that `EngineWeights` and front ends call in each worker.

RequestError and UnsupportedError are returned as values, because exceptions lose their type between
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from modulm.errors import ModulmError, RequestError, UnsupportedError

__all__ = [
    "cancel",
    "changed",
    "check",
    "complete",
    "compute_checksums",
    "connect",
    "disconnect",
    "drop",
    "finish",
    "receive",
    "release",
    "reset_weights",
    "restore",
    "start",
    "suspend",
    "value_of",
    "verify",
]

if TYPE_CHECKING:
    from modulm_weight_transfer.receiver import WeightReceiver

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


def _receiver(worker: Any) -> WeightReceiver:
    """The receiver of a worker; imports torch, which front ends do not."""
    from modulm_weight_transfer.receiver import receiver_of

    return receiver_of(worker)


def value_of(answer: list[Any]) -> Any:
    """Unpack a function's answer: return its value or raise its error."""
    kind, *values = answer
    if kind is None:
        return values[0]
    error: ModulmError = {"RequestError": RequestError}.get(kind, UnsupportedError)(*values)
    raise error


@_answers
def connect(worker: Any, info: Mapping[str, Any]) -> None:
    """See `WeightReceiver.connect`."""
    from modulm_weight_transfer.receiver import WeightReceiver

    WeightReceiver.connect(worker, info)


@_answers
def disconnect(worker: Any) -> None:
    """See `WeightReceiver.disconnect`."""
    from modulm_weight_transfer.receiver import WeightReceiver

    WeightReceiver.disconnect(worker)


@_answers
def start(worker: Any, partial_update: bool) -> None:
    """See `WeightReceiver.start`."""
    _receiver(worker).start(partial_update)


@_answers
def check(worker: Any, number: int, info: Mapping[str, Any]) -> bool:
    """See `WeightReceiver.check`."""
    return _receiver(worker).check(number, info)


@_answers
def verify(worker: Any, number: int, wait: bool) -> bool:
    """See `WeightReceiver.verify`."""
    return _receiver(worker).verify(number, wait)


@_answers
def drop(worker: Any, number: int) -> None:
    """See `WeightReceiver.drop`."""
    _receiver(worker).drop(number)


@_answers
def receive(worker: Any) -> None:
    """See `WeightReceiver.receive`."""
    _receiver(worker).receive()


@_answers
def changed(worker: Any) -> bool:
    """See `WeightReceiver.changed`."""
    return _receiver(worker).changed()


@_answers
def complete(worker: Any) -> bool:
    """See `WeightReceiver.complete`."""
    return _receiver(worker).complete()


@_answers
def finish(worker: Any) -> None:
    """See `WeightReceiver.finish`."""
    _receiver(worker).finish()


@_answers
def cancel(worker: Any) -> None:
    """See `WeightReceiver.cancel`."""
    _receiver(worker).cancel()


@_answers
def release(worker: Any) -> None:
    """Discard all that refers to the weights of a worker, which has released them."""
    from modulm_weight_transfer.direct import note_release
    from modulm_weight_transfer.receiver import WeightReceiver

    note_release(worker.config)
    WeightReceiver.release(worker)


@_answers
def suspend(worker: Any) -> None:
    """Move a sleeping worker's weights from its device to host memory."""
    from modulm_weight_transfer.suspension import suspend_weights

    suspend_weights(worker)


@_answers
def restore(worker: Any) -> None:
    """Bring back the weights of a sleeping worker: from host memory, or from the checkpoint."""
    from modulm_weight_transfer.suspension import restore_weights

    restore_weights(worker)


@_answers
def compute_checksums(worker: Any) -> dict[str, str]:
    """See `weight_checksums`."""
    from modulm_weight_transfer.checksums import weight_checksums

    return weight_checksums(worker)


@_answers
def reset_weights(worker: Any) -> None:
    """Set all weights of a worker to zero."""
    from modulm_weight_transfer.checksums import zero_weights

    zero_weights(worker)
