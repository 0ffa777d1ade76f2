"""The GGUF container: metadata and tensor infos (ggml, docs/gguf.md, versions 2 and 3).

Files are not trusted: every count is checked against the remaining bytes, every tensor against the
end of its file. A model may be split over several files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.errors import CheckpointError
from modulm_quant_gguf.types import NUMBERED, Kind, dequantize

__all__ = ["MAGIC", "Model", "TensorInfo", "open_model", "split_files"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_DEEPEST = 3
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
#: `struct` formats of numbers by type code; 8 are strings, 9 are arrays.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _LIST = 8, 9
#: Minimum bytes of a metadata entry and of a tensor info.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 24


@frozen(eq=False)
class TensorInfo:
    """A tensor in a file: its shape (contiguous dimension last), type and byte offset."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    file: Path
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) // self.kind.block * self.kind.bytes

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of what `Model.read` returns: rows of bytes, or of plain numbers."""
        if self.kind.dtype is not None:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.kind.block * self.kind.bytes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what `Model.read` returns."""
        return self.kind.dtype or torch.uint8


@frozen(eq=False)
class Model:
    """A model in one or several files: the metadata of the first, the tensors of all."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _maps: dict[Path, Tensor] = field(factory=dict)

    def read(self, name: str) -> Tensor:
        """Return a tensor as stored. It is memory-mapped and read when it is copied."""
        info = self.tensors[name]
        if info.file not in self._maps:
            size = info.file.stat().st_size
            self._maps[info.file] = torch.from_file(str(info.file), False, size, dtype=torch.uint8)
        raw = self._maps[info.file][info.offset : info.offset + info.bytes]
        if len(raw) < info.bytes:
            raise CheckpointError(f"{info.file}: {name}: the file was truncated while it was read")
        if info.kind.dtype is not None:
            # Tensors are aligned to the file's alignment, which may be less than the size of a
            # number.
            aligned = raw if info.offset % info.dtype.itemsize == 0 else raw.clone()
            raw = aligned.view(info.dtype)
        return raw.reshape(info.stored)

    def numbers(self, name: str) -> Tensor:
        """Return a tensor in fp32."""
        return dequantize(self.tensors[name].kind, self.read(name))


def split_files(path: Path) -> Sequence[Path]:
    """Return all files of a model, given one of them. Raises CheckpointError if one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    files = [path.with_name(f"{stem}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count))]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{path}: missing files of the split model: {', '.join(missing[:3]) or 'all'}"
        )
    return files


def open_model(path: Path) -> Model:
    """Read the headers of the files of `path`. Raises CheckpointError if one is not a GGUF file."""
    files = split_files(path)
    try:
        known = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise CheckpointError(f"{path}: reading failed: {error}") from error
    return _open(known)


@lru_cache(maxsize=2)
def _open(files: tuple[tuple[Path, int, int], ...]) -> Model:
    """Read the headers; cached by file, size and time, since startup needs them several times."""
    whole: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, (file, size, _) in enumerate(files):
        metadata, infos = _read_file(file, size)
        if len(files) > 1:
            _check_split(file, metadata, number, len(files))
        whole = {**metadata, **whole}
        for info in infos:
            if info.name in tensors:
                other = tensors[info.name].file.name
                raise CheckpointError(f"{file}: {info.name} is also in {other}")
            tensors[info.name] = info
    expected = whole.get("split.tensors.count", len(tensors)) if len(files) > 1 else len(tensors)
    if expected != len(tensors):
        raise CheckpointError(
            f"{files[0][0]}: split.tensors.count: {expected} tensors expected, {len(tensors)} found"
        )
    return Model(files[0][0], whole, tensors)


def _check_split(file: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    stated = (metadata.get("split.no"), metadata.get("split.count"))
    if stated != (number, count):
        expected = f"expected {number} of {count} from its name"
        raise CheckpointError(
            f"{file}: split.no and split.count: {stated[0]} of {stated[1]}, {expected}"
        )


def _read_file(file: Path, size: int) -> tuple[dict[str, Any], list[TensorInfo]]:
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"{file}: not a GGUF file: it begins with {magic!r}")
        data = torch.from_file(str(file), False, size, dtype=torch.uint8).numpy()
    except OSError as error:
        raise CheckpointError(f"{file}: reading failed: {error}") from error
    cursor = _Cursor(memoryview(data), file)
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        kind = "big-endian, or version" if version >= 1 << 16 else "version"
        raise CheckpointError(f"{file}: {kind} {version}; supported versions: {_VERSIONS}")
    tensors = cursor.count(_LEAST_TENSOR, "tensors")
    entries = cursor.count(_LEAST_ENTRY, "entries of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text("a key of the metadata")
        if key in metadata:
            raise CheckpointError(f"{file}: duplicate key {key}")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    described = [_describe(cursor, file) for _ in range(tensors)]
    return metadata, list(_locate(described, metadata, cursor.at, size))


def _describe(cursor: _Cursor, file: Path) -> TensorInfo:
    """Read one tensor info; its offset is relative to the data section."""
    name = cursor.text("a tensor's name")
    dimensions = cursor.number("I", name)
    if dimensions > _MOST_DIMENSIONS:
        raise CheckpointError(f"{file}: {name}: {dimensions} dimensions; at most 4 are supported")
    shape = tuple(cursor.number("Q", name) for _ in range(dimensions))[::-1] or (1,)
    number, offset = cursor.number("I", name), cursor.number("Q", name)
    kind = NUMBERED.get(number)
    if kind is None:
        known = ", ".join(one.name for one in NUMBERED.values())
        raise CheckpointError(f"{file}: {name}: unknown type {number}; supported: {known}")
    if shape[-1] % kind.block:
        raise CheckpointError(
            f"{file}: {name}: {kind.name} needs rows of whole blocks of {kind.block}, "
            f"not {shape[-1]} columns"
        )
    return TensorInfo(name, shape, kind, file, offset)


def _locate(
    described: Sequence[TensorInfo], metadata: Mapping[str, Any], at: int, size: int
) -> Iterator[TensorInfo]:
    """Yield the tensors with offsets from the start of the file, checked against its end."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        file = described[0].file if described else "GGUF"
        raise CheckpointError(f"{file}: general.alignment: {alignment!r} is invalid")
    data = -(-at // alignment) * alignment
    seen: set[str] = set()
    reach, last = data, ""
    for info in sorted(described, key=lambda one: one.offset):
        begin, file = data + info.offset, info.file
        if info.name in seen:
            raise CheckpointError(f"{file}: duplicate tensor {info.name}")
        seen.add(info.name)
        if info.offset % alignment:
            raise CheckpointError(
                f"{file}: {info.name}: its offset {info.offset} is not a multiple of {alignment}"
            )
        if begin + info.bytes > size:
            raise CheckpointError(
                f"{file}: {info.name}: {info.kind.name} of shape {list(info.shape)} takes "
                f"{info.bytes} bytes from {begin}, but the file has {size}: it is truncated"
            )
        if begin < reach and info.bytes:
            raise CheckpointError(f"{file}: {info.name}: overlaps {last}")
        reach, last = begin + info.bytes, info.name
        yield TensorInfo(info.name, info.shape, info.kind, file, begin)


class _Cursor:
    """Reads values in sequence, never beyond the end of the file."""

    def __init__(self, data: memoryview, file: Path) -> None:
        self.data, self.file, self.at = data, file, len(MAGIC)

    def take(self, size: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if size > left:
            raise CheckpointError(
                f"{self.file}: {what}: {size} bytes expected and {left} left: the file is "
                "truncated, or not a GGUF file"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str, what: str) -> Any:
        form = "<" + form
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, least: int, what: str) -> int:
        """Read a count of items of at least `least` bytes each."""
        count: int = self.number("Q", what)
        left = len(self.data) - self.at
        if count * least > left:
            raise CheckpointError(
                f"{self.file}: {count} {what} do not fit into the {left} bytes that follow"
            )
        return count

    def text(self, what: str) -> str:
        raw = self.take(self.count(1, f"bytes of {what}"), what)
        # A token of a vocabulary may be part of a character.
        return str(raw, "utf-8", "replace")

    def texts(self, count: int, what: str) -> list[str]:
        """Read `count` strings; an inlined loop, because vocabularies have hundreds of
        thousands.
        """
        data, at, end, texts = self.data, self.at, len(self.data), []
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            length = length_of(data, at)[0] if at + 8 <= end else end
            at += 8
            if length > end - at:
                raise CheckpointError(
                    f"{self.file}: {what}: a string of {length} bytes exceeds the remaining bytes"
                )
            texts.append(str(data[at : at + length], "utf-8", "replace"))
            at += length
        self.at = at
        return texts

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self.text(what)
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind != _LIST or depth == _DEEPEST:
            raise CheckpointError(f"{self.file}: {what}: unknown value type {kind}")
        inner = self.number("I", what)
        if inner in _NUMBERS:
            each = struct.calcsize("<" + _NUMBERS[inner])
            count = self.count(each, f"numbers of {what}")
            form = f"<{count}{_NUMBERS[inner]}"
            return list(struct.unpack(form, self.take(count * each, what)))
        count = self.count(8, f"values of {what}")
        if inner == _TEXT:
            return self.texts(count, what)
        return [self.value(inner, what, depth + 1) for _ in range(count)]
