"""Files of packed weights: arrays that are mapped, and a description of what they are.

    magic, version, where the description is, its SHA-256       4096 bytes
    arrays, each at a multiple of 64 bytes, in pages of their own per group
    the description, as JSON

The head is written last, so a file without a valid one is not complete.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["VERSION", "Array", "FileReader", "FileWriter", "InvalidFile", "Mapped"]

#: Raised when the layout of the file or the meaning of its description changes.
VERSION = 1

_MAGIC = b"modulm packed weights\0\0\0"
_HEAD = struct.Struct("<24sQQQ32s")
_PAGE = mmap.ALLOCATIONGRANULARITY
_ALIGNED = 64

#: (offset, dtype, shape, order): dimensions in the order of their strides, largest first.
Array = tuple[int, str, list[int], list[int]]


class InvalidFile(Exception):
    """A file that cannot be used; the message says why."""


class FileWriter:
    """Writes a file, group by group; `mapped` returns what was written as mapped arrays."""

    def __init__(self, path: Path, limit: int) -> None:
        """limit: most bytes. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self.path, self._limit = path, limit
        self._file = os.open(path, flags, 0o600)
        self._end = self._start = _PAGE

    def add(self, tensor: Tensor) -> Array:
        """Append a tensor's values to the group. Raises OSError, OverflowError."""
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        dense = tensor.detach().permute(order).contiguous()
        offset = -(-self._end // _ALIGNED) * _ALIGNED
        self._end = offset + dense.nbytes
        if self._end > self._limit:
            raise OverflowError
        if dense.nbytes:
            values: Any = dense.reshape(-1).view(torch.uint8).numpy()
            _write(self._file, memoryview(values), offset)
        return offset, str(dense.dtype).removeprefix("torch."), list(dense.shape), order

    def mapped(self) -> Mapped:
        """End the group, and map it."""
        start, self._start = self._start, -(-self._end // _PAGE) * _PAGE
        self._end = self._start
        os.ftruncate(self._file, self._start)
        return Mapped(self._file, start, self._start - start)

    def finish(self, description: Any) -> None:
        """Write the description and the head to the disk. Raises OSError."""
        text = json.dumps(description, separators=(",", ":")).encode()
        _write(self._file, memoryview(text), self._start)
        os.fsync(self._file)
        head = _HEAD.pack(_MAGIC, VERSION, self._start, len(text), sha256(text).digest())
        _write(self._file, memoryview(head), 0)
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; mapped groups stay."""
        os.close(self._file)


class FileReader:
    """A complete file, mapped whole."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, or InvalidFile if it is torn, of another version or owner."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InvalidFile(f"cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(file)
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
                raise InvalidFile("can be written by other users")
            self.description, end = _description(file, status.st_size)
            self.mapped = Mapped(file, 0, end)
        finally:
            os.close(file)
        self.bytes = status.st_size


class Mapped:
    """Arrays of a mapped part of a file. What is written into them stays in this process."""

    def __init__(self, file: int, start: int, size: int) -> None:
        self._start = start
        self._memory: mmap.mmap | None = None
        if size:
            # A private mapping: torch requires writable memory, and updates write to copies.
            self._memory = mmap.mmap(
                file,
                size,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=start,
            )

    def tensor(self, array: Array) -> Tensor:
        """Return a tensor whose memory is the file's. Raises InvalidFile."""
        offset, name, shape, order = array
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidFile(f"has an unknown dtype {name!r}")
        count, back = 1, [order.index(dim) for dim in range(len(order))]
        for size in shape:
            count *= size
        if not count or self._memory is None:
            return torch.empty(shape, dtype=dtype).permute(back)
        try:
            flat = torch.frombuffer(
                self._memory, dtype=dtype, count=count, offset=offset - self._start
            )
        except (ValueError, RuntimeError) as error:
            raise InvalidFile(f"has an array outside of it: {error}") from error
        return flat.view(shape).permute(back)


def _write(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _description(file: int, size: int) -> tuple[Any, int]:
    """Read the description, and where it begins. Raises InvalidFile."""
    head = os.pread(file, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise InvalidFile("is not complete, or not of this program")
    _, version, start, length, digest = _HEAD.unpack(head)
    if version != VERSION:
        raise InvalidFile(f"has version {version}, not {VERSION}")
    text = os.pread(file, length, start) if start + length == size else b""
    if sha256(text).digest() != digest:
        raise InvalidFile("is damaged")
    return json.loads(text), start
