"""PyTorch checkpoints: pytorch_model.bin, or its shards and their index.

Such files are pickles, which can call any function. torch's restricted reader (`weights_only`)
accepts tensors and plain containers and rejects everything else before executing it. Files are
memory-mapped: a tensor is read when it is copied.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError
from modulm_tensor_files.folder import TensorFolder

if TYPE_CHECKING:
    import torch

__all__ = ["PickledFolder", "read_tensors"]

_SINGLE = "pytorch_model.bin"
_SHARD = re.compile(r"pytorch_model-\d+-of-\d+\.bin")


class PickledFolder(TensorFolder):
    """A folder with pytorch_model.bin, or with shards and their index."""

    downloads = ("pytorch_model*.bin",)
    fallback = True
    INDEX = "pytorch_model.bin.index.json"

    def is_shard(self, name: str) -> bool:
        return name == _SINGLE or _SHARD.fullmatch(name) is not None

    def files(self) -> list[str]:
        if not (self.path / _SINGLE).exists():
            raise CheckpointError(f"{self.path}: neither {_SINGLE} nor {self.INDEX} exists")
        return [_SINGLE]

    def headers(self, file: str) -> Iterable[StoredTensor]:
        for name, tensor in read_tensors(self.path / file).items():
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            yield StoredTensor(name, shape, dtype, file, tensor.nbytes)

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file, names in self.by_file().items():
            table = read_tensors(self.path / file)
            for name in names:
                yield name, table.pop(name)

    @classmethod
    def found_in(cls, path: Path) -> str | None:
        """Return the name of the folder's index or file, None if it has neither."""
        names = [name for name in (cls.INDEX, _SINGLE) if (path / name).exists()]
        return names[0] if names else None


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Open the tensors of one file, memory-mapped.

    Raises CheckpointError if the file is damaged or holds anything but a table of plain tensors;
    nothing in such a file is executed.
    """
    import torch

    try:
        # Files from before torch 1.6 are not archives and cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        table = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{file}: more than a table of tensors, or damaged; nothing was executed: "
            f"{_reason(error)}"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {_reason(error)}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: a table of tensors is expected, not {type(table).__name__}")
    for name, tensor in table.items():
        plain = isinstance(name, str) and isinstance(tensor, torch.Tensor)
        if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
            kind = type(tensor).__name__
            raise CheckpointError(f"{file}: {name!r}: a plain tensor is expected, not a {kind}")
    return dict(table)


def _reason(error: Exception) -> str:
    """Return torch's message without its advice to disable the restriction."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (relevant or lines or [type(error).__name__])[0][:300]
