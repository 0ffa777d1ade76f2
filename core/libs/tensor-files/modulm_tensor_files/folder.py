"""A folder with one file of tensors, or several with an optional index.

The index is JSON: `weight_map` maps a tensor's name to its file.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from modulm.contracts.loader import StoredTensor, WeightLoader
from modulm.errors import CheckpointError

__all__ = ["TensorFolder"]


class TensorFolder(WeightLoader):
    """Tensors of several files, by name. `INDEX` is the name of the index file, if any."""

    INDEX: ClassVar[str] = ""

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path, options)
        if options:
            raise CheckpointError(f"the {self.name} loader has no options, got {sorted(options)}")
        self._index: dict[str, StoredTensor] | None = None

    @abstractmethod
    def files(self) -> list[str]:
        """Names of files if there is no index. Raises CheckpointError if there are none."""

    @abstractmethod
    def headers(self, file: str) -> Iterable[StoredTensor]:
        """Read the tensor headers of one file. Raises CheckpointError."""

    def is_shard(self, name: str) -> bool:
        """Whether an index may name this file."""
        return Path(name).name == name

    def index(self) -> Mapping[str, StoredTensor]:
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def by_file(self) -> Mapping[str, list[str]]:
        """File -> names of the tensors read from it."""
        names_by_file: dict[str, list[str]] = {}
        for name, stored in self.index().items():
            names_by_file.setdefault(stored.file, []).append(name)
        return names_by_file

    def _read_index(self) -> dict[str, StoredTensor]:
        weight_map = self._weight_map()
        files = sorted(set(weight_map.values())) if weight_map is not None else self.files()
        index: dict[str, StoredTensor] = {}
        for file in files:
            for stored in self.headers(file):
                if weight_map is not None and weight_map.get(stored.name, file) != file:
                    continue
                if stored.name in index:
                    raise CheckpointError(
                        f"{self.path}: {stored.name} is both in {index[stored.name].file} and in "
                        f"{stored.file}"
                    )
                index[stored.name] = stored
        missing = [name for name in weight_map or () if name not in index]
        if missing and weight_map is not None:
            raise CheckpointError(
                f"{self.path / self.INDEX}: {missing[0]} should be in "
                f"{weight_map[missing[0]]}, which does not have it ({len(missing)} such names)"
            )
        return index

    def _weight_map(self) -> Mapping[str, str] | None:
        """Read the index: tensor name -> file. None without an index."""
        file = self.path / self.INDEX
        if not self.INDEX or not file.exists():
            return None
        try:
            weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: weight_map: a table of name -> file is expected"
            ) from error
        names: set[str] = set()
        for name in weight_map.values() if isinstance(weight_map, dict) else [None]:
            if not isinstance(name, str) or not self.is_shard(name):
                raise CheckpointError(f"{file}: weight_map: {name!r} is not a valid file name")
            names.add(name)
        missing = sorted(name for name in names if not (self.path / name).exists())
        if missing:
            raise CheckpointError(f"{file}: {', '.join(missing)} missing from {self.path}")
        return dict(weight_map)
