"""Every call into a plugin's code: an error says whose it is, output stays off standard output.

What a command prints (JSON, generated text) goes to standard output, so while plugins are imported
and asked, `print` writes to standard error.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from traceback import walk_tb
from types import FrameType
from typing import Any

from modulm.errors import ModulmError, PluginBroken
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import libraries
from modulm.plugins.moved import new_home

__all__ = ["ask", "blame", "broken", "importing"]

log = logging.getLogger("modulm.plugins")

#: Seconds after which an import is reported, and after which it is given up.
_SLOW, _GIVEN_UP = 20.0, 300.0


def broken(what: str, error: BaseException) -> PluginBroken:
    """The error to raise for one that a plugin raised; the traceback is logged at debug level."""
    log.debug("%s raised", what, exc_info=error)
    return PluginBroken(f"{what}: {type(error).__name__}: {error}{new_home(error)}")


def ask(declaration: Declaration, driver: Any, method: str, answer: Any, *arguments: Any) -> Any:
    """What a driver answers; `answer` is its type.

    Raises PluginBroken, which names driver and method, if it raises what is no error of ours or
    answers with something else.
    """
    what = f"{declaration}: {method}"
    try:
        with redirect_stdout(sys.stderr):
            reply = getattr(driver, method)(*arguments)
    except ModulmError:
        raise
    except (Exception, SystemExit) as error:
        raise broken(f"{what} raised", error) from error
    if not isinstance(reply, answer):
        expected = getattr(answer, "__name__", answer)
        raise PluginBroken(f"{what} gave {reply!r}, which is no {expected}")
    return reply


@contextmanager
def importing(declaration: Declaration) -> Iterator[None]:
    """Say which import takes long, and end one that takes minutes (in the main thread, where
    nobody else uses SIGALRM).
    """
    timer = threading.Timer(_SLOW, _warn_slow, (declaration, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        with redirect_stdout(sys.stderr), _limit(_GIVEN_UP):
            yield
    finally:
        timer.cancel()


def _warn_slow(declaration: Declaration, thread: int) -> None:
    """Report an import that takes long, and whose code runs: often torch's, on a busy machine."""
    own = declaration.target.partition(":")[0].partition(".")[0]
    frame, package = sys._current_frames().get(thread), "sys"
    while frame is not None and package in sys.stdlib_module_names:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back
    named = declaration.distribution or declaration.name
    at = f"; to leave it out: --plugins=-{named}" if package == own else f", at work in {package}"
    log.warning("%s is still being imported after %g s%s", declaration, _SLOW, at)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def blame(error: BaseException, declared: Iterable[Declaration]) -> PluginBroken | None:
    """The same error with the plugin in whose code it was raised, or None if it was in nobody's.

    For calls of drivers that are in use, which are too many to wrap: the innermost frame of a
    package that offers something tells whose it is, and which method. Code that plugins are written
    with (the core and its libraries) and the user's own program are no plugin.
    """
    homes: dict[str, Declaration] = {}
    everyones = {"modulm", "__main__", *libraries()}
    for declaration in declared:
        module = declaration.target.partition(":")[0]
        if module.partition(".")[0] not in everyones:
            homes[module] = declaration
            homes.setdefault(module.partition(".")[0], declaration)
    culprit = None
    for frame, line in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        owner = homes.get(module) or homes.get(module.partition(".")[0])
        if owner is not None:
            code = frame.f_code
            culprit = f"{owner}: {code.co_qualname} ({code.co_filename}:{line}) raised"
    return None if culprit is None else broken(culprit, error)
