"""PyTorch checkpoints, converted on the first load to numpy files that later loads read.

The folder `np` holds one .npy file per tensor, named after the tensor, and weight_names.json with
all names; vLLM reads and writes the same layout. Dtypes that numpy lacks are stored as unsigned
integers with the same bits. cache.json records these dtypes and the source files; the cache is
rebuilt when the sources change. The files are memory-mapped. Pickled numpy files are rejected.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError
from modulm_tensor_files import PickledFolder

__all__ = ["NpcacheLoader"]

_FOLDER, _NAMES, _NOTES = "np", "weight_names.json", "cache.json"
#: Bytes of a number -> the integer type that stores its bits.
#: Version of the cache's format; the first one was not noted.
_VERSION = 1
_BITS = {1: torch.uint8, 2: torch.uint16}


class NpcacheLoader(PickledFolder):
    """pytorch_model.bin or its shards, through the cache. Writes into the checkpoint's folder."""

    name = "npcache"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None

    def index(self) -> Mapping[str, StoredTensor]:
        if self._index is None:
            self._index = self._cached() or self._read_index()
        return self._index

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read from the cache, or read the pickles and write the cache on the way."""
        if all(stored.file.endswith(".npy") for stored in self.index().values()):
            for name, stored in self.index().items():
                yield name, _open(self.path / stored.file, stored.dtype)
            return
        try:
            partial = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}.", dir=self.path))
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot write the cache ({error}); --load-format pt needs none"
            ) from error
        try:
            for name, tensor in super().read():
                _save(partial / f"{_plain(name, self.path)}.npy", tensor)
                yield name, tensor
            self._complete(partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _complete(self, partial: Path) -> None:
        """Move a complete cache to its final path, unless another process was first."""
        index = self.index()
        (partial / _NAMES).write_text(json.dumps(list(index)))
        kinds = {name: stored.dtype for name, stored in index.items()}
        notes = {"version": _VERSION, "dtypes": kinds, "sources": self._sources()}
        (partial / _NOTES).write_text(json.dumps(notes))
        partial.chmod(0o755)
        cache = self.path / _FOLDER
        if cache.exists() and self._cached() is None:
            shutil.rmtree(cache)
        if not cache.exists():
            os.rename(partial, cache)

    def _sources(self) -> Mapping[str, list[int]]:
        """Return the size and the time of modification of each file of the checkpoint."""
        weight_map = self._weight_map()
        files = sorted(set(weight_map.values())) if weight_map is not None else self.files()
        stats = {file: (self.path / file).stat() for file in files}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}

    def _cached(self) -> dict[str, StoredTensor] | None:
        """Return the cached tensors; None without a cache, if the checkpoint has changed, or if
        another release wrote the cache.
        """
        cache = self.path / _FOLDER
        if not (cache / _NAMES).exists():
            return None
        names, notes = _json(cache / _NAMES), {}
        if (cache / _NOTES).exists():
            notes = _json(cache / _NOTES)
            if not isinstance(notes, dict) or notes.get("sources") != self._sources():
                return None
            if notes.get("version", _VERSION) != _VERSION:
                return None  # of another release
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{cache / _NAMES}: must be a list of names")
        kinds = notes.get("dtypes", {})
        stored = {}
        for name in names:
            file = f"{_FOLDER}/{_plain(name, cache)}.npy"
            tensor = _open(self.path / file, kinds.get(name))
            dtype = str(tensor.dtype).removeprefix("torch.")
            stored[name] = StoredTensor(name, tuple(tensor.shape), dtype, file, tensor.nbytes)
        return stored


def _plain(name: str, where: Path) -> str:
    """Return a tensor's name. Raises CheckpointError if it cannot be a file name."""
    if Path(name).name != name:
        raise CheckpointError(f"{where}: {name!r} is not a valid file name")
    return name


def _save(file: Path, tensor: torch.Tensor) -> None:
    bits = _BITS.get(tensor.element_size())
    lacking = tensor.is_floating_point() and tensor.dtype not in (
        torch.float16,
        torch.float32,
        torch.float64,
    )
    tensor_data = tensor.detach().contiguous()
    np.save(file, (tensor_data.view(bits) if lacking and bits else tensor_data).numpy())


def _open(file: Path, dtype: object) -> torch.Tensor:
    """Memory-map a .npy file. Raises CheckpointError if it is damaged."""
    try:
        array: Any = np.load(file, mmap_mode="c", allow_pickle=False)
        tensor = torch.from_numpy(array)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise CheckpointError(
            f"{file}: not a numpy file of numbers ({error}); remove {file.parent} to rebuild it"
        ) from error
    if dtype is None:
        return tensor
    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype) or kind.itemsize != tensor.element_size():
        raise CheckpointError(
            f"{file.parent / _NOTES}: {file.name}: {dtype!r} does not fit numbers of "
            f"{tensor.element_size()} bytes"
        )
    return tensor if tensor.dtype == kind else tensor.view(kind)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {error}; remove {file.parent} to rebuild it") from (error)
