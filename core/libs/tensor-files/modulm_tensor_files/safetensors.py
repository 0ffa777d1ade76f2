"""Safetensors files, single or sharded (huggingface/safetensors, README "Format").

A file is 8 bytes (the header's length, little endian), a JSON header (name -> dtype, shape, offsets
into the data), and the data. Validating the header is sufficient.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError
from modulm_tensor_files.folder import TensorFolder

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsFolder", "read_header"]

_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000
#: Maximum tensors of a file; no published checkpoint has more in all its files together.
_MOST_TENSORS = 1 << 18

_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}


class SafetensorsFolder(TensorFolder):
    """model.safetensors, shards with their index, or any *.safetensors files.

    Each tensor is mapped when it is read. A name `folder/name` is of a tensor in the files of a
    sub-folder, which are read if the model takes such a tensor.
    """

    downloads = ("*.safetensors",)
    INDEX = "model.safetensors.index.json"
    _folders: tuple[str, ...] = ()

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        self._folders = tuple(sorted({name.rpartition("/")[0] for name in tensors} - {""}))
        return super().expect(tensors)

    def _read_index(self) -> dict[str, StoredTensor]:
        index = super()._read_index()
        for folder in self._folders:
            for file in sorted((self.path / folder).glob("*.safetensors")):
                for stored in read_header(file):
                    name = f"{folder}/{stored.name}"
                    index[name] = evolve(stored, name=name, file=f"{folder}/{file.name}")
        return index

    def files(self) -> list[str]:
        if (self.path / _SINGLE).exists():
            return [_SINGLE]
        shards = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{self.path}: no *.safetensors files")
        return shards

    def headers(self, file: str) -> Iterable[StoredTensor]:
        return read_header(self.path / file)

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import SafetensorError, safe_open

        for file, names in self.by_file().items():
            try:
                folder = file[: file.rfind("/") + 1]
                with safe_open(self.path / file, framework="pt") as opened:
                    for name in names:
                        yield name, opened.get_tensor(name.removeprefix(folder))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / file}: cannot be read: {error}") from error


def read_header(file: Path) -> Iterator[StoredTensor]:
    """Read the tensors of one file. Raises CheckpointError for truncated or invalid files.

    Enforces the format: unique names, each tensor as many bytes as its shape and dtype need, and
    tensors that cover the data without gaps or overlaps.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(
                    f"{file}: not a safetensors file: header of {length} bytes in a file of {size}"
                )
            text = opened.read(length)
        if text.count(b'"data_offsets"') > _MOST_TENSORS:  # before they take memory
            raise _too_many(file)
        header = json.loads(text, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a table of tensors")
    if len(header) - ("__metadata__" in header) > _MOST_TENSORS:
        raise _too_many(file)
    reach = 0
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    stored = [_parse_entry(file, name, entry, size - 8 - length) for name, entry in entries]
    for start, end, tensor in sorted(stored, key=lambda one: one[:2]):
        if start != reach:
            what = "overlaps another tensor" if start < reach else "follows a gap in the data"
            raise CheckpointError(f"{file}: {tensor.name}: begins at {start} and {what}")
        reach = end
    if reach != size - 8 - length:
        raise CheckpointError(f"{file}: {size - 8 - length - reach} bytes too many after the data")
    yield from (tensor for _, _, tensor in stored)


def _too_many(file: Path) -> CheckpointError:
    return CheckpointError(f"{file}: more than {_MOST_TENSORS} tensors in a file: split it")


@cache
def _item_size(dtype: str) -> int:
    """Bytes of one number of a torch dtype."""
    import torch

    size: int = getattr(torch, dtype).itemsize
    return size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from pairs. Raises ValueError for duplicate names."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"duplicate name {name}")
        table[name] = value
    return table


def _parse_entry(file: Path, name: str, entry: Any, data: int) -> tuple[int, int, StoredTensor]:
    """Parse a header entry; returns (first byte, end, tensor)."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {name}: bad header entry {entry!r}") from error
    if dtype not in _DTYPES:
        raise CheckpointError(f"{file}: {name}: unknown dtype {dtype!r}")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(f"{file}: {name}: shape {shape} at {start} to {end}")
    if end > data:
        raise CheckpointError(
            f"{file}: {name}: the file is truncated: it needs {end} bytes of data and has {data}"
        )
    kind = _DTYPES[dtype]
    expected = prod(shape) * _item_size(kind)
    if end - start != expected:
        raise CheckpointError(
            f"{file}: {name}: {dtype} of shape {shape} takes {expected} bytes, not {end - start}"
        )
    return start, end, StoredTensor(name, tuple(shape), kind, file.name, expected)
