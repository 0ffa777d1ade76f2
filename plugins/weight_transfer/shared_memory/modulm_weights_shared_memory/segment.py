"""Tensors in shared memory: a file in /dev/shm that only its user may read."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import torch
from torch import Tensor

from modulm.contracts.loader import StoredTensor
from modulm.errors import RequestError
from modulm_weight_transfer.contract import read_tensor_info

__all__ = ["SharedTensors", "SharedWeights", "unlink_abandoned"]

_FOLDER = Path("/dev/shm")  # noqa: S108  files there are made for their user alone
_NAME = re.compile(r"modulm-shared-weights-[0-9a-f]{32}")
#: Alignment of tensors in bytes.
_ALIGNED = 64


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
        size = max((offset + count for _, offset, count in _layout(described)), default=0)
        unlink_abandoned()
        self._path = _FOLDER / f"modulm-shared-weights-{uuid4().hex}"
        # The name ends differently until the lock is held, so that nobody takes it for abandoned.
        opening = self._path.with_suffix(".new")
        handle = os.open(opening, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            opening.rename(self._path)
            os.posix_fallocate(handle, 0, max(size, 1))
            self._memory = mmap.mmap(handle, max(size, 1))
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
        """Copy tensors by name over the previous ones. Raises KeyError, ValueError."""
        for name, tensor in tensors.items():
            offset, dtype, shape = self._places[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: {list(tensor.shape)} is not {list(shape)}")
            _view(self._memory, dtype, shape, offset).copy_(tensor.detach())

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


class SharedTensors:
    """The tensors of a `SharedWeights`, in an engine."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        name = info.get("segment")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError("segment: must be the name that SharedWeights returns", "segment")
        self._tensors = read_tensor_info(info)
        self._memory = _mapped(_FOLDER / name)
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

    def close(self) -> None:
        """Do nothing: the mapping is freed with the last tensor that uses it."""


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
