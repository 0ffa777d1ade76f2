"""Calls into plugins' code: errors name the plugin, and prints go to standard error.

Standard output is reserved for the output of commands (JSON, generated text).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from traceback import walk_tb
from types import FrameType
from typing import Any

from modulm.errors import ModulmError, PluginBroken
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import libraries
from modulm.plugins.moved import new_home

__all__ = ["ask", "blame", "broken", "importing", "watchers"]

log = logging.getLogger("modulm.plugins")

#: Seconds after which an import is reported and aborted; how often its stack is looked at before.
_SLOW, _GIVEN_UP, _SAMPLES = 20.0, 300.0, 40
#: The last is entered around each import.
watchers: list[Callable[[Declaration], AbstractContextManager[Any]]] = [nullcontext]


def broken(what: str, error: BaseException) -> PluginBroken:
    """Return the error to raise for a plugin's exception; logs its traceback at debug level."""
    log.debug("%s raised an error", what, exc_info=error)
    return PluginBroken(f"{what}: {type(error).__name__}: {error}{new_home(error)}")


def ask(declaration: Declaration, driver: Any, method: str, answer: Any, *arguments: Any) -> Any:
    """Call a driver's method and return its result, of type `answer`.

    Raises PluginBroken naming driver and method for a result of another type, and for exceptions
    other than ModulmError.
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
        raise PluginBroken(f"{what} gave {reply!r}, not {getattr(answer, '__name__', answer)}")
    return reply


@contextmanager
def importing(declaration: Declaration) -> Iterator[None]:
    """Report slow imports, and abort one that takes minutes.

    Aborting works in the main thread, if SIGALRM is not used otherwise.
    """
    ended = threading.Event()
    arguments = (declaration, threading.get_ident(), ended)
    threading.Thread(target=_watch, args=arguments, daemon=True).start()
    try:
        with watchers[-1](declaration), redirect_stdout(sys.stderr), _limit(_GIVEN_UP):
            yield
    finally:
        ended.set()


def _watch(declaration: Declaration, thread: int, ended: threading.Event) -> None:
    """Report a slow import and the package whose own code took most of the time."""
    seen: Counter[str] = Counter()
    for _ in range(_SAMPLES):
        if ended.wait(_SLOW / _SAMPLES):
            return
        seen[_working_package(thread)] += 1
    package = max(seen, key=lambda name: seen[name])
    named = declaration.distribution or declaration.name
    own = declaration.target.partition(":")[0].partition(".")[0]
    at = f"; to leave it out: --plugins=-{named}" if package == own else f", at work in {package}"
    log.warning("%s is still being imported after %g s%s", declaration, _SLOW, at)


def _working_package(thread: int) -> str:
    """Return the package whose code a thread runs: of the innermost frame outside the library."""
    frame, package = sys._current_frames().get(thread), "sys"
    while frame is not None and package in sys.stdlib_module_names:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back
    return package


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
    """Return the error with the name of the plugin that raised it, or None if no plugin did.

    Calls of drivers in use are too many to wrap. Instead, the innermost frame that belongs to a
    plugin's package determines plugin and method. The core, its libraries and the user's program
    are not plugins.
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
