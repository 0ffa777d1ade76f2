"""PyTorch checkpoints, read once and from then on out of numpy files beside them.

The folder `np` has a .npy file per tensor, called as the tensor, and weight_names.json with all
names, as vLLM writes and reads it. Of dtypes that numpy lacks the bits are kept, in unsigned
integers; cache.json says of which, and of which files the cache was made: it is made anew when
they change. A file of this kind is mapped, and read when it is copied into place; a pickle in one
is refused.
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
#: Bytes of a number -> what its bits are kept as.
_BITS = {1: torch.uint8, 2: torch.uint16}


class NpcacheLoader(PickledFolder):
    """pytorch_model.bin or its shards, through the cache. Writes into the checkpoint's folder."""

    name = "npcache"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None

    def index(self) -> Mapping[str, StoredTensor]:
        if self._found is None:
            self._found = self._cached() or self._read_index()
        return self._found

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """From the cache; where there is none yet, from the pickles, and into it on the way."""
        if all(stored.file.endswith(".npy") for stored in self.index().values()):
            for name, stored in self.index().items():
                yield name, _open(self.path / stored.file, stored.dtype)
            return
        try:
            made = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}.", dir=self.path))
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the cache cannot be written here ({error}); --load-format pt "
                "needs none"
            ) from error
        try:
            for name, tensor in super().read():
                _save(made / f"{_plain(name, self.path)}.npy", tensor)
                yield name, tensor
            self._complete(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _complete(self, made: Path) -> None:
        """Move a whole cache into place; if another process was first, theirs stays."""
        index = self.index()
        (made / _NAMES).write_text(json.dumps(list(index)))
        kinds = {name: stored.dtype for name, stored in index.items()}
        (made / _NOTES).write_text(json.dumps({"dtypes": kinds, "sources": self._sources()}))
        made.chmod(0o755)
        place = self.path / _FOLDER
        if place.exists() and self._cached() is None:
            shutil.rmtree(place)
        if not place.exists():
            os.rename(made, place)

    def _sources(self) -> Mapping[str, list[int]]:
        """Size and time of change of each file of the checkpoint."""
        places = self._weight_map()
        files = sorted(set(places.values())) if places is not None else self.files()
        found = {file: (self.path / file).stat() for file in files}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in found.items()}

    def _cached(self) -> dict[str, StoredTensor] | None:
        """What the cache holds; None without one, or if the checkpoint changed since."""
        place = self.path / _FOLDER
        if not (place / _NAMES).exists():
            return None
        names, notes = _json(place / _NAMES), {}
        if (place / _NOTES).exists():
            notes = _json(place / _NOTES)
            if not isinstance(notes, dict) or notes.get("sources") != self._sources():
                return None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{place / _NAMES}: a list of names is needed")
        kinds = notes.get("dtypes", {})
        found = {}
        for name in names:
            file = f"{_FOLDER}/{_plain(name, place)}.npy"
            tensor = _open(self.path / file, kinds.get(name))
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[name] = StoredTensor(name, tuple(tensor.shape), dtype, file, tensor.nbytes)
        return found


def _plain(name: str, where: Path) -> str:
    """A tensor's name as a file's. Raises CheckpointError for one that leads elsewhere."""
    if Path(name).name != name:
        raise CheckpointError(f"{where}: {name!r} cannot be the name of a file")
    return name


def _save(file: Path, tensor: torch.Tensor) -> None:
    bits = _BITS.get(tensor.element_size())
    lacking = tensor.is_floating_point() and tensor.dtype not in (
        torch.float16,
        torch.float32,
        torch.float64,
    )
    held = tensor.detach().contiguous()
    np.save(file, (held.view(bits) if lacking and bits else held).numpy())


def _open(file: Path, dtype: object) -> torch.Tensor:
    """The numbers of a file, mapped. Raises CheckpointError if it is damaged or no such file."""
    try:
        array: Any = np.load(file, mmap_mode="c", allow_pickle=False)
        tensor = torch.from_numpy(array)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise CheckpointError(
            f"{file}: no numpy file of numbers ({error}); remove {file.parent} to have it made anew"
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
        raise CheckpointError(f"{file}: {error}; remove {file.parent} to have it made anew") from (
            error
        )
