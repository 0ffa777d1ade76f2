"""A folder with one file of tensors, or several and perhaps an index of them.

An index is JSON: `weight_map`, a table of a tensor's name -> the file that it is in.
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
    """Tensors of several files by name. `INDEX` is the file that says where each is, if any."""

    INDEX: ClassVar[str] = ""

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path, options)
        if options:
            raise CheckpointError(f"the {self.name} loader has no options, got {sorted(options)}")
        self._found: dict[str, StoredTensor] | None = None

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the files, where no index says them. Raises CheckpointError for none."""

    @abstractmethod
    def headers(self, file: str) -> Iterable[StoredTensor]:
        """The tensors of one file. Raises CheckpointError."""

    def is_shard(self, name: str) -> bool:
        """Whether an index may name this file."""
        return Path(name).name == name

    def index(self) -> Mapping[str, StoredTensor]:
        if self._found is None:
            self._found = self._read_index()
        return self._found

    def by_file(self) -> Mapping[str, list[str]]:
        """File -> names of what is read of it."""
        found: dict[str, list[str]] = {}
        for name, stored in self.index().items():
            found.setdefault(stored.file, []).append(name)
        return found

    def _read_index(self) -> dict[str, StoredTensor]:
        places = self._weight_map()
        files = sorted(set(places.values())) if places is not None else self.files()
        found: dict[str, StoredTensor] = {}
        for file in files:
            for stored in self.headers(file):
                if places is not None and places.get(stored.name, file) != file:
                    continue
                if stored.name in found:
                    raise CheckpointError(
                        f"{self.path}: {stored.name} is both in {found[stored.name].file} and in "
                        f"{stored.file}"
                    )
                found[stored.name] = stored
        lost = [name for name in places or () if name not in found]
        if lost and places is not None:
            raise CheckpointError(
                f"{self.path / self.INDEX}: {lost[0]} should be in {places[lost[0]]}, which does "
                f"not have it ({len(lost)} such names)"
            )
        return found

    def _weight_map(self) -> Mapping[str, str] | None:
        """The index's name -> file, or None without an index."""
        file = self.path / self.INDEX
        if not self.INDEX or not file.exists():
            return None
        try:
            places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: weight_map: a table of name -> file is needed"
            ) from error
        names: set[str] = set()
        for name in places.values() if isinstance(places, dict) else [None]:
            if not isinstance(name, str) or not self.is_shard(name):
                raise CheckpointError(f"{file}: weight_map: {name!r} is no name of a file here")
            names.add(name)
        missing = sorted(name for name in names if not (self.path / name).exists())
        if missing:
            raise CheckpointError(f"{file}: {', '.join(missing)} missing from {self.path}")
        return dict(places)
