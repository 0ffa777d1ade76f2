"""Calls to several engines, joined into one future."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from modulm.errors import EngineDead, EngineError

__all__ = ["call_all", "of_replica", "then", "without_result"]

C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")


def call_all(
    clients: Sequence[C],
    call: Callable[[C], Future[T]],
    undo: Callable[[C], object] | None = None,
) -> Future[list[T]] | None:
    """Call all clients: their results, or the first error once all have answered. None if no client
    can be reached.

    undo: called for each client that succeeded if another one failed.
    """
    calls: list[tuple[C, Future[T]]] = []
    for client in clients:
        with suppress(EngineDead):
            calls.append((client, call(client)))
    if not calls:
        return None
    together = Future[list[T]]()
    together.set_running_or_notify_cancel()
    missing = len(calls)
    lock = threading.Lock()

    def answered(_: Future[T]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            left = missing
        if not left:
            _conclude(together, calls, undo)

    for _, answer in calls:
        answer.add_done_callback(answered)
    return together


def _conclude(
    together: Future[list[T]],
    calls: Sequence[tuple[C, Future[T]]],
    undo: Callable[[C], object] | None,
) -> None:
    """Resolve the joined future; all calls have been answered."""
    failed = next((error for _, answer in calls if (error := answer.exception())), None)
    if failed is None:
        together.set_result([answer.result() for _, answer in calls])
        return
    for client, answer in calls:
        if undo is not None and answer.exception() is None:
            with suppress(EngineDead):
                undo(client)
    together.set_exception(failed)


def then(answers: Future[list[T]], join: Callable[[list[T]], R]) -> Future[R]:
    """A future with the joined results."""
    joined = Future[R]()
    joined.set_running_or_notify_cancel()

    def done(answers: Future[list[T]]) -> None:
        error = answers.exception()
        if error is None:
            joined.set_result(join(answers.result()))
        else:
            joined.set_exception(error)

    answers.add_done_callback(done)
    return joined


def of_replica(rank: int, answer: Future[T]) -> Future[T]:
    """The same future, with the replica named in errors of workers."""
    named = Future[T]()
    named.set_running_or_notify_cancel()

    def done(answer: Future[T]) -> None:
        error = answer.exception()
        if error is None:
            named.set_result(answer.result())
        elif isinstance(error, EngineError) and not isinstance(error, EngineDead):
            named.set_exception(type(error)(f"replica {rank}: {error}"))
        else:
            named.set_exception(error)

    answer.add_done_callback(done)
    return named


def without_result(answers: Future[list[Any]]) -> Future[None]:
    """The same future without a result."""
    return then(answers, lambda _: None)
