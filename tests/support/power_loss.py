"""What a folder may look like after a power loss.

Only what was flushed is certain: the content of a file by `fsync` of it, its name by `fsync` of its
folder. Everything later may be on the disk, partly or not at all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

__all__ = ["PowerLosses", "State", "restore"]

#: Names and contents: content by path relative to the folder; None: a folder.
State = dict[str, bytes | None]


def _nothing(_: bytes, certain: bytes) -> bytes:
    return certain


def _half(now: bytes, certain: bytes) -> bytes:
    return now[: (len(certain) + len(now)) // 2] if len(now) > len(certain) else now


def _zeros(now: bytes, certain: bytes) -> bytes:
    """The size has reached the disk, the content has not."""
    return certain[: len(now)] + bytes(max(0, len(now) - len(certain)))


@define
class PowerLosses:
    """Notes each state that a power loss could leave while files below `folder` change.

    promises: what the code under test has acknowledged so far, filled by the test. states: the
    states, each with the promises at its time.
    """

    folder: Path
    promises: dict[str, Any] = field(factory=dict)
    states: list[tuple[str, State, dict[str, Any]]] = field(factory=list)
    _contents: dict[int, tuple[bytes, int]] = field(factory=dict)
    _names: dict[Path, dict[str, int]] = field(factory=dict)
    _lock: threading.RLock = field(factory=threading.RLock)

    @contextmanager
    def watch(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note the states before and after each operation that orders or changes names."""
        originals = {name: getattr(os, name) for name in ("replace", "unlink", "mkdir")}
        with patch.context() as context:
            context.setattr(os, "fsync", self._fsync)
            for name, original in originals.items():
                context.setattr(os, name, self._noted(name, original))
            yield
        self.note("end")
        for _, descriptor in self._contents.values():
            os.close(descriptor)

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **keywords: Any) -> Any:
            with self._lock:
                self.note(f"before {name} {Path(args[0]).name}")
                result = original(*args, **keywords)
                self.note(f"after {name} {Path(args[0]).name}")
                return result

        return operation

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with self._lock:
            self.note(f"before fsync {path.name}")
            if path.is_dir():
                self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                # The duplicate holds the inode's number.
                inode = os.fstat(descriptor).st_ino
                old = self._contents.get(inode)
                content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
                self._contents[inode] = content, old[1] if old else os.dup(descriptor)
            self.note(f"after fsync {path.name}")

    def note(self, moment: str) -> None:
        """Note the states that a power loss at this moment could leave."""
        with self._lock:
            flushed = self._flushed(self.folder, "")
            self._add(moment, flushed)
            for loss in (_nothing, _half, _zeros):
                self._add(f"{moment}, {loss.__name__}", self._current(loss))
            present = self._current(_nothing)
            for name in sorted(flushed.keys() ^ present.keys()):
                if flushed.get(name) is None and present.get(name) is None:
                    continue  # a folder
                one_lost = {**present, name: flushed[name]} if name in flushed else {**present}
                if name not in flushed:
                    del one_lost[name]
                self._add(f"{moment}, all but {name}", one_lost)

    def _add(self, moment: str, state: State) -> None:
        entry = state, dict(self.promises)
        if all(entry != earlier[1:] for earlier in self.states):
            self.states.append((moment, *entry))

    def _flushed(self, folder: Path, prefix: str) -> State:
        """Only what was flushed."""
        state: State = {}
        for name, inode in self._names.get(folder, {}).items():
            if folder / name in self._names or (folder / name).is_dir():
                state |= {f"{prefix}{name}": None}
                state |= self._flushed(folder / name, f"{prefix}{name}/")
            else:
                state[f"{prefix}{name}"] = self._contents.get(inode, (b"", 0))[0]
        return state

    def _current(self, loss: Callable[[bytes, bytes], bytes]) -> State:
        """The present names, and of each content what a loss leaves."""
        state: State = {}
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.is_dir():
                state[name] = None
            else:
                certain = self._contents.get(path.stat().st_ino, (b"", 0))[0]
                state[name] = loss(path.read_bytes(), certain)
        return state


def restore(state: State, folder: Path) -> None:
    """Write a state into a new folder."""
    folder.mkdir()
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)
