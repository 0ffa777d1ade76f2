"""Tensors in shared memory: a file in /dev/shm that only its user may read.

Behind the tensors a segment has one byte for each (1: its writer has found all values finite), and
a digest of their names, dtypes and shapes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from modulm.contracts.loader import StoredTensor
from modulm.errors import RequestError
from modulm_weight_transfer.contract import read_tensor_info
from modulm_weight_transfer.finite import CHUNK, is_finite

__all__ = ["KeptMapping", "SharedTensors", "SharedWeights", "unlink_abandoned"]

_FOLDER = Path("/dev/shm")  # noqa: S108  files there are made for their user alone
_NAME = re.compile(r"modulm-shared-weights-[0-9a-f]{32}")
#: Alignment of tensors in bytes.
_ALIGNED = 64
#: Seconds between two looks whether a mapped segment has been closed.
_LOOK = 1.0


def _layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Iterator[tuple[str, int, int]]:
    """The name, offset and bytes of each tensor. Raises RequestError for an unknown dtype."""
    offset = 0
    for name, dtype, shape in tensors:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise RequestError(f"{name}: {dtype!r} is not a dtype", "update_info")
        size = prod(shape) * kind.itemsize
        yield name, offset, size
        offset += -(-size // _ALIGNED) * _ALIGNED


def _view(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    kind, count = getattr(torch, dtype), prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)


def unlink_abandoned() -> None:
    """Unlink the segments of this user whose trainers have ended without closing them.

    A trainer holds a lock on its segment, which the kernel releases even when it is killed.
    """
    for path in _FOLDER.glob("modulm-shared-weights-*"):
        with contextlib.suppress(OSError):
            if not _NAME.fullmatch(path.name) or path.stat().st_uid != os.getuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


class SharedWeights:
    """Tensors of a trainer that engines on the same host read.

        with SharedWeights(model.state_dict()) as shared:
            llm.start_weight_update()
            llm.update_weights(shared.info)
            llm.finish_weight_update()

    `write` copies other values into the same memory, for the next update. Not before
    `finish_weight_update` has returned: until then engines may read.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        described = [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in tensors.items()]
        self._places = {n: (o, d, s) for (n, o, _), (_, d, s) in zip(
            _layout(described), described, strict=True
        )}  # fmt: skip
        end, digest = _end(described), _digest(described)
        #: Offset of each tensor's mark.
        self._marks = {name: end + number for number, (name, _, _) in enumerate(described)}
        size = end + len(described) + len(digest)
        unlink_abandoned()
        self._path = _FOLDER / f"modulm-shared-weights-{uuid4().hex}"
        # The name ends differently until the lock is held, so that nobody takes it for abandoned.
        opening = self._path.with_suffix(".new")
        handle = os.open(opening, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            opening.rename(self._path)
            os.posix_fallocate(handle, 0, size)
            self._memory = mmap.mmap(handle, size)
            self._memory[-len(digest) :] = digest
        except BaseException:
            opening.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            os.close(handle)
            raise
        self._lock: int | None = handle
        names, dtypes, shapes = zip(*described, strict=True) if described else ((), (), ())
        #: The `update_info` of `update_weights`.
        self.info: dict[str, Any] = {
            "segment": self._path.name,
            "names": list(names),
            "dtype_names": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
        }
        self.write(tensors)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors by name over the previous ones. Raises KeyError, ValueError.

        Values are checked while they are in the cache, so that engines need not read them again.
        """
        for name, tensor in tensors.items():
            offset, dtype, shape = self._places[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: {list(tensor.shape)} is not {list(shape)}")
            target, mark = _view(self._memory, dtype, shape, offset), self._marks[name]
            self._memory[mark] = 0
            self._memory[mark] = _copy_checked(target, tensor.detach())

    def close(self) -> None:
        """Unlink the memory; engines that have mapped it keep it until they are done."""
        self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _end(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """The bytes of a segment's tensors."""
    return max((offset + size for _, offset, size in _layout(tensors)), default=0)


def _digest(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """What the marks of a segment are for: names, dtypes and shapes of its tensors."""
    described = repr([(name, dtype, tuple(shape)) for name, dtype, shape in tensors])
    return hashlib.blake2b(described.encode(), digest_size=16).digest()


def _copy_checked(target: Tensor, source: Tensor) -> bool:
    """Copy values and return whether all are finite."""
    bits = {2: torch.int16, 4: torch.int32}.get(target.itemsize)
    alike = source.dtype == target.dtype and source.is_contiguous()
    if bits is None or not alike or source.device != target.device:
        return is_finite(target.copy_(source))
    # numpy copies in this thread; torch would wake its others for each chunk.
    old, new = (tensor.view(-1).view(bits).numpy() for tensor in (target, source))
    finite, values = True, target.view(-1)
    for start in range(0, len(new), CHUNK):
        part = slice(start, start + CHUNK)
        old[part] = new[part]
        finite &= is_finite(values[part])
    return finite


class SharedTensors:
    """The tensors of a `SharedWeights`, in an engine."""

    def __init__(self, info: Mapping[str, Any], kept: KeptMapping) -> None:
        self._tensors = read_tensor_info(info)
        self._memory = kept.open(info)
        self._places = {}
        for (tensor, dtype, shape), (_, offset, size) in zip(
            self._tensors, _layout(self._tensors), strict=True
        ):
            if offset + size > len(self._memory):
                raise RequestError(f"{tensor} exceeds the shared memory", "update_info")
            self._places[tensor] = dtype, shape, offset, size

    def index(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(name, shape, dtype, "the update", size)
            for name, (dtype, shape, _, size) in self._places.items()
        }

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for name, (dtype, shape, offset, _) in self._places.items():
            yield name, _view(self._memory, dtype, shape, offset)

    def checked(self) -> frozenset[str]:
        """Return the tensors whose writer has found all values finite."""
        digest = _digest(self._tensors)
        start = len(self._memory) - len(digest) - len(self._tensors)
        if start < 0 or self._memory[-len(digest) :] != digest:
            return frozenset()
        marks = self._memory[start : -len(digest)]
        return frozenset(name for name, mark in zip(self._places, marks, strict=True) if mark == 1)

    def close(self) -> None:
        """Do nothing: the mapping stays for the next update."""


class KeptMapping:
    """The segment of the last update, which stays mapped for the next one.

    A new mapping costs a page fault for every 64 KB, a third of the time of an update. The memory
    is given back when the trainer has closed the segment, or has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name: str | None = None
        self._memory: mmap.mmap | None = None

    def open(self, info: Mapping[str, Any]) -> mmap.mmap:
        """Map the segment that `update_info` names. Raises RequestError."""
        name = info.get("segment")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError("segment: must be the name that SharedWeights returns", "segment")
        with self._lock:
            if self._name == name and (self._memory is None or _is_changed(self._memory)):
                self._name = None  # copies of pages, in which later values would not be seen
            if self._memory is None or self._name != name or not (_FOLDER / name).exists():
                memory = _mapped(_FOLDER / name)
                if self._memory is None:
                    threading.Thread(target=self._watch, name="weight-segment", daemon=True).start()
                self._name, self._memory = name, memory
            return self._memory

    def release(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._name = self._memory = None

    def _watch(self) -> None:
        """Release the mapping once its trainer is gone."""
        while True:
            time.sleep(_LOOK)
            with self._lock:
                name = self._name
                if name is None or not (_FOLDER / name).exists():
                    self._name = self._memory = None
                    return
            unlink_abandoned()


def _is_changed(memory: mmap.mmap) -> bool:
    """Whether a private mapping has pages of its own, by the kernel's table of pages."""
    page = mmap.PAGESIZE
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() // page
    count = -(-len(memory) // page)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            table.seek(8 * start)
            entries = np.frombuffer(table.read(8 * count), np.uint64)
    except OSError:
        return True
    present, shared = np.uint64(1 << 63), np.uint64(1 << 61)
    return len(entries) != count or bool(((entries & present != 0) & (entries & shared == 0)).any())


def _mapped(path: Path) -> mmap.mmap:
    """Map a segment of this user. Raises RequestError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RequestError(f"segment: {path.name}: {error.strerror}", "segment") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise RequestError(f"segment: {path.name} does not belong to this user", "segment")
        # A private mapping, because torch requires writable memory.
        return mmap.mmap(
            handle, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except (OSError, ValueError) as error:
        raise RequestError(f"segment: {path.name}: {error}", "segment") from error
    finally:
        os.close(handle)
