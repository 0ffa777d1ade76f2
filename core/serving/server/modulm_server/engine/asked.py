"""One question to several, whose answers are one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from modulm.errors import EngineDead

__all__ = ["ask_all", "nothing", "then"]

C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")


def ask_all(
    clients: Sequence[C],
    ask: Callable[[C], Future[T]],
    undo: Callable[[C], object] | None = None,
) -> Future[list[T]] | None:
    """What all say, or what went wrong first, once all have answered; None if nobody can be asked.

    undo: what is done with those that answered where another one could not.
    """
    asked: list[tuple[C, Future[T]]] = []
    for client in clients:
        with suppress(EngineDead):
            asked.append((client, ask(client)))
    if not asked:
        return None
    together = Future[list[T]]()
    together.set_running_or_notify_cancel()
    missing = len(asked)
    lock = threading.Lock()

    def answered(_: Future[T]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            left = missing
        if not left:
            _conclude(together, asked, undo)

    for _, answer in asked:
        answer.add_done_callback(answered)
    return together


def _conclude(
    together: Future[list[T]],
    asked: Sequence[tuple[C, Future[T]]],
    undo: Callable[[C], object] | None,
) -> None:
    """All have answered."""
    failed = next((error for _, answer in asked if (error := answer.exception())), None)
    if failed is None:
        together.set_result([answer.result() for _, answer in asked])
        return
    for client, answer in asked:
        if undo is not None and answer.exception() is None:
            with suppress(EngineDead):
                undo(client)
    together.set_exception(failed)


def then(answers: Future[list[T]], join: Callable[[list[T]], R]) -> Future[R]:
    """What all answers mean together."""
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


def nothing(answers: Future[list[Any]]) -> Future[None]:
    """That all have done it."""
    return then(answers, lambda _: None)
