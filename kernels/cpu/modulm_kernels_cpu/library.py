"""Find and load the compiled library: one per instruction set, by default the best usable one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from platform import machine
from typing import Any, Protocol

__all__ = [
    "ARM", "BUILD_ALL", "LEVELS", "Calls", "Library", "LibraryMissing", "check", "levels", "load",
    "runnable", "use",
]  # fmt: skip

#: Instruction sets of x86 and of Arm, weakest first; the position is the number that the library
#: reports. SVE is used in vectors of 256 bits, which Neoverse V1 has; others use NEON.
X86 = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
ARM = ("scalar", "neon", "neon_bf16", "sve256")
LEVELS = ARM if machine() in ("aarch64", "arm64") else X86

#: How to build the levels that an editable install omits.
BUILD_ALL = "SKBUILD_CMAKE_DEFINE=MODULM_LEVELS=all make setup"

_PREFIX = "libmodulm_cpu_"

#: Default level of `load`; None for the best one.
_default: str | None = None


class LibraryMissing(ImportError):
    """The compiled library is missing: the package was installed without a C++ compiler."""


class Calls(Protocol):
    """Observer of the C functions that a thread calls (see `modulm_kernels_cpu.replay`)."""

    def add(self, thunk: int | None, name: str, signature: str, arguments: tuple[Any, ...]) -> None:
        """Record a call of `name`; `thunk` repeats the call from slots, None if nothing can."""


class Library:
    """One loaded level. `call(name)` returns a C function that takes ints, floats and pointers."""

    def __init__(self, level: str, path: Path) -> None:
        self.level, self._path = level, path
        self._listening = threading.local()
        try:
            self._handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryMissing(
                f"cannot load {path.name}: {error}; reinstall modulm-kernels-cpu with a C++ "
                "compiler, or remove it to use plain torch"
            ) from error

    def call(self, name: str, signature: str, result: type | None = None) -> Callable[..., Any]:
        """Return the function `modulm_<name>`.

        `signature` has a letter per argument: p pointer (an address or None), n int64, i int, f
        float.
        """
        try:
            function = self._handle[f"modulm_{name}"]
        except AttributeError as error:
            raise LibraryMissing(
                f"the compiled library has no {name}: it is older than this package; reinstall "
                "modulm-kernels-cpu"
            ) from error
        function.argtypes = [_TYPES[letter] for letter in signature]
        function.restype = result
        thunk = self._thunk(name)
        listening = self._listening

        def call(*arguments: Any) -> Any:
            calls = listening.__dict__.get("calls")
            if calls is not None:
                calls.add(thunk, name, signature, arguments)
            return function(*arguments)

        return call

    def _thunk(self, name: str) -> int | None:
        """Return the address of the function that repeats `name` from slots (src/base/replay.h)."""
        try:
            return ctypes.cast(self._handle[f"modulm_replay_{name}"], ctypes.c_void_p).value
        except AttributeError:
            return None

    @contextmanager
    def listen(self, calls: Calls) -> Iterator[None]:
        """Report to `calls` every C function that this thread calls inside the context."""
        self._listening.calls = calls
        try:
            yield
        finally:
            self._listening.calls = None

    def identity(self) -> str:
        """Return the level and a digest of this package's code, compiled and not."""
        digest = sha256()
        for file in (self._path, *sorted(Path(__file__).parent.glob("*.py"))):
            digest.update(file.read_bytes())
        return f"{self.level} {digest.hexdigest()}"

    def set_threads(self, count: int) -> None:
        """Use `count` threads, including the caller; 0 for one per core of the affinity mask."""
        self.call("set_threads", "i")(count)

    @property
    def threads(self) -> int:
        """The number of threads that work on one op, including the caller."""
        return int(self.call("threads", "", ctypes.c_int)())


_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


def _path(level: str) -> Path:
    """Return the path of the level's library: beside this file, or in an editable build's
    folder.
    """
    import modulm_kernels_cpu

    name = f"{_PREFIX}{level}.so"
    for folder in modulm_kernels_cpu.__path__:
        if (path := Path(folder) / name).exists():
            return path
    raise LibraryMissing(
        f"modulm_kernels_cpu has no {name}: it was installed without a C++ compiler; reinstall "
        "modulm-kernels-cpu with g++ or clang installed, or remove it to use plain torch"
    )


@cache
def runnable() -> tuple[str, ...]:
    """Return the levels that this CPU supports, built or not, weakest first."""
    built = [level for level in LEVELS if _is_built(level)]
    weakest = _load(built[0] if built else "scalar")  # which reports what is missing
    highest = weakest.call("highest_level", "", ctypes.c_int)()
    return LEVELS[: highest + 1]


def _is_built(level: str) -> bool:
    try:
        _path(level)
    except LibraryMissing:
        return False
    return True


@cache
def levels() -> tuple[str, ...]:
    """Return the levels that this CPU supports and that were built, weakest first."""
    return tuple(level for level in runnable() if _is_built(level))


def load(level: str | None = None) -> Library:
    """Return the library of `level`; by default the one set by `use`, else the best usable one.

    Raises ValueError if it was not built or the CPU does not support it.
    """
    if level is None:
        return _load(_default or levels()[-1])
    check(level)
    return _load(level)


def check(level: str) -> None:
    """Raise ValueError unless `level` can be loaded."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    if level not in runnable():
        raise ValueError(f"this CPU supports {', '.join(runnable())}, not {level}")
    if level not in levels():
        raise ValueError(
            f"{level} was not built; built: {', '.join(levels())}; to build all: {BUILD_ALL}"
        )


def use(level: str | None) -> None:
    """Make `level` the default of this process; None restores the best one.

    Raises as `load` does.
    """
    global _default
    _default = None if level is None else load(level).level


@cache
def _load(level: str) -> Library:
    return Library(level, _path(level))
