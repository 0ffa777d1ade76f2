"""What a package changes for others in its process: torch's, numpy's and Python's globals."""

from __future__ import annotations

import locale
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from modulm.plugins.calls import watchers
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import is_first_party

__all__ = ["changes", "process_state", "watch_imports"]

log = logging.getLogger("modulm.plugins")

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1", "SIGUSR2")
#: Name -> its value in this process.
_PYTHON: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "Python's recursion limit": sys.getrecursionlimit,
        "Python's random numbers": random.getstate,
        "sys.excepthook": lambda: sys.excepthook,
        "the locale": lambda: locale.setlocale(locale.LC_ALL),
        "the timeout of sockets": socket.getdefaulttimeout,
        "the current folder": os.getcwd,
        "the level of the root logger": lambda: logging.getLogger().level,
        "handlers of the root logger": lambda: tuple(logging.getLogger().handlers),
        **{
            f"the handler of {name}": partial(signal.getsignal, getattr(signal, name))
            for name in _SIGNALS
            if hasattr(signal, name)
        },
    }
)
#: Of modules that the package may be the first to import: name -> how it is read, its default.
_TORCH: Mapping[str, tuple[Callable[[Any], Any], Any]] = MappingProxyType(
    {
        "torch's default dtype": (lambda t: str(t.get_default_dtype()), "torch.float32"),
        "torch's default device": (lambda t: str(t.get_default_device()), "cpu"),
        "torch's gradient mode": (lambda t: t.is_grad_enabled(), True),
        "torch's deterministic algorithms": (
            lambda t: t.are_deterministic_algorithms_enabled(),
            False,
        ),
        "torch's precision of products": (lambda t: t.get_float32_matmul_precision(), "highest"),
        # The doctor starts its processes with OMP_NUM_THREADS=1; a start ignores this default.
        "torch's number of threads": (lambda t: t.get_num_threads(), 1),
    }
)
_NUMPY: Mapping[str, tuple[Callable[[Any], Any], Any]] = MappingProxyType(
    {
        "numpy's handling of errors": (
            lambda n: n.geterr(),
            {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
        ),
    }
)


def process_state() -> dict[str, Any]:
    """Return what packages can change for others, by name. Imports nothing."""
    state = {name: read() for name, read in _PYTHON.items()}
    for module, entries in (("torch", _TORCH), ("numpy", _NUMPY)):
        loaded = sys.modules.get(module)
        for name, (read, default) in entries.items():
            state[name] = default if loaded is None else read(loaded)
    return state


def watch_imports() -> None:
    """Log from now on what imports of other projects' plugins change in this process."""
    if _watch not in watchers:
        watchers.append(_watch)


@contextmanager
def _watch(declaration: Declaration) -> Iterator[None]:
    """Look at this process before and after an import, and log what differs."""
    if is_first_party(declaration.distribution):
        yield
        return
    # Random numbers are drawn by other threads too; torch chooses its threads when it is imported.
    ignored = {"Python's random numbers"}
    if "torch" not in sys.modules:
        ignored.add("torch's number of threads")
    before = {name: value for name, value in process_state().items() if name not in ignored}

    yield
    changed = changes(before)
    if changed:
        log.warning("%s %s, for everything in this process", declaration, changed)


def changes(before: Mapping[str, Any]) -> str:
    """Return what differs from an earlier state: "changes the locale, ...", or ""."""
    now = process_state()
    changed = [name for name in before if before[name] != now[name]]
    return f"changes {', '.join(changed)}" if changed else ""
