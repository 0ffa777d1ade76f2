"""Finding and loading the compiled library: one per instruction set, the best one this CPU runs."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

__all__ = ["LEVELS", "Library", "LibraryMissing", "levels", "load"]

#: Instruction sets, weakest first; the position is the number that the library reports.
LEVELS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")

_PREFIX = "libmodulm_cpu_"


class LibraryMissing(ImportError):
    """The compiled library is not there: the package was installed without a C++ compiler."""


class Library:
    """One loaded level. `call(name)` gives a C function that takes ints, floats and pointers."""

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        try:
            self._handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryMissing(
                f"cannot load {path.name}: {error}; reinstall modulm-kernels-cpu with a C++ "
                "compiler, or go without it: plain torch is used then"
            ) from error

    def call(
        self, name: str, signature: str, result: type | None = None
    ) -> ctypes._NamedFuncPointer:
        """The function `modulm_<name>`.

        `signature` has a letter per argument: p pointer (an address or None), n int64, i int,
        f float.
        """
        function = self._handle[f"modulm_{name}"]
        function.argtypes = [_TYPES[letter] for letter in signature]
        function.restype = result
        return function

    def set_threads(self, count: int) -> None:
        """Use `count` threads, the caller included; 0 for one per core of the affinity mask."""
        self.call("set_threads", "i")(count)

    @property
    def threads(self) -> int:
        """Threads that work on one op, the caller included."""
        return int(self.call("threads", "", ctypes.c_int)())


_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


def _path(level: str) -> Path:
    """Where the level's library lies: beside this file, or where an editable build left it."""
    import modulm_kernels_cpu

    name = f"{_PREFIX}{level}.so"
    for folder in modulm_kernels_cpu.__path__:
        if (path := Path(folder) / name).exists():
            return path
    raise LibraryMissing(
        f"modulm_kernels_cpu has no {name}: it was installed without a C++ compiler; reinstall "
        "modulm-kernels-cpu with g++ or clang present, or go without it: plain torch is used then"
    )


@cache
def levels() -> tuple[str, ...]:
    """The levels that this processor runs and that were built, weakest first."""
    highest = _load("scalar").call("highest_level", "", ctypes.c_int)()
    found = []
    for level in LEVELS[: highest + 1]:
        try:
            _path(level)
        except LibraryMissing:
            continue
        found.append(level)
    return tuple(found)


def load(level: str | None = None) -> Library:
    """The library of `level`, by default the best one that runs here.

    Raises LibraryMissing if it was not built, ValueError if the processor cannot run it.
    """
    if level is None:
        return _load(levels()[-1])
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    if level not in levels():
        raise ValueError(f"this processor runs {', '.join(levels())}, not {level}")
    return _load(level)


@cache
def _load(level: str) -> Library:
    return Library(level, _path(level))
