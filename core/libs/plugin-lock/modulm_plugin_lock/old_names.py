"""Old names of modulm that installed packages import: they work for two minor versions, and warn.

Nothing is prepared in advance. When the import of a package fails for a name in `moved.txt`, the
module that had it gets a `__getattr__` which finds the new one, and the import is tried again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any
from warnings import warn_explicit

from modulm.plugins.moved import missing_names, moved

__all__ = ["UNTIL", "ModulmDeprecationWarning", "keep_old_name"]

#: The version from which on the old names in `moved.txt` are errors.
UNTIL = "0.3"
_warned: set[tuple[str, str, int]] = set()


class ModulmDeprecationWarning(FutureWarning):
    """A name was used that a later version of modulm does not have.

    Issued once for each name and line that uses it.
    """


def keep_old_name(error: BaseException | None) -> bool:
    """Make the old name of a failed import work. Returns whether the import may be tried again."""
    names = missing_names(error) if error is not None else []
    if not names:
        return False
    path, owner = names
    if not _new_name(path) and not any(old.startswith(f"{path}.") for old in moved()):
        return False
    return _forward(owner, sys.modules[owner]) if owner else _add_module(path)


def _add_module(path: str) -> bool:
    """Add a module under an old path, which has nothing but old names."""
    if path in sys.modules:
        return False
    module = ModuleType(path, "Old names.")
    module.__path__ = []
    module.__spec__ = ModuleSpec(path, None, is_package=True)
    _forward(path, module)
    sys.modules[path] = module
    parent, _, last = path.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return True


def _forward(owner: str, module: ModuleType) -> bool:
    """Give a module the names that it had; False if it has them."""
    before = getattr(module, "__getattr__", None)
    if isinstance(before, partial):
        return False
    vars(module)["__getattr__"] = partial(_old_name, owner, before)
    return True


def _old_name(owner: str, before: Callable[[str], Any] | None, name: str) -> Any:
    """Return the object that has moved: the `__getattr__` of a module with old names."""
    new = "" if name.startswith("__") else _new_name(f"{owner}.{name}")
    if not new:
        if before is None:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        return before(name)
    _warn_once(f"{owner}.{name} is now {new}; the old name works until modulm {UNTIL}")
    return resolve_name(new)


def _warn_once(message: str) -> None:
    """Warn at the line that uses a name; not again when its module is executed again."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    place = (message, frame.f_code.co_filename, frame.f_lineno)
    if place not in _warned:
        _warned.add(place)
        warn_explicit(message, ModulmDeprecationWarning, *place[1:])


def _new_name(old: str) -> str:
    """Return where a dotted name is now, by the longest prefix that has moved; "" if nowhere."""
    rest: list[str] = []
    while old and old not in moved():
        old, _, last = old.rpartition(".")
        rest.insert(0, last)
    new = moved().get(old, "gone")
    return "" if new.startswith("gone") else ".".join([new, *rest])
