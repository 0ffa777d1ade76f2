"""The backend `files`: each update is a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError, RequestError
from modulm_tensor_files import SafetensorsFolder
from modulm_weight_transfer.contract import TensorSource, WeightTransferBackend

__all__ = ["FilesBackend", "FilesConfig"]


def _folder(value: Any) -> Path:
    path = Path(value)
    if not path.is_absolute():
        raise ValueError(f"folder: {value!r} is not an absolute path")
    return path


@frozen
class FilesConfig:
    """folder: updates are in folders below this one."""

    folder: Path = field(converter=_folder)


class _Files(SafetensorsFolder):
    """The tensors of one folder."""

    name = "update"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None

    def close(self) -> None:
        """Do nothing: files are mapped only while a tensor is read."""


class _Refusing:
    """Turns errors of a file source into request errors, since the trainer wrote the files."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        try:
            self._index = files.index()
        except CheckpointError as error:
            raise RequestError(str(error), "path") from error

    def index(self) -> Mapping[str, StoredTensor]:
        return self._index

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._files.read()

    def close(self) -> None:
        self._files.close()


class FilesBackend(WeightTransferBackend):
    """Files that a trainer has saved where the engine can read them."""

    name = "files"
    api = 1
    Config = FilesConfig

    def connect(self, info: Mapping[str, Any]) -> None:
        """Do nothing: each update names its folder."""

    def open(self, info: Mapping[str, Any]) -> TensorSource:
        """Open an update. info: `path`, a folder below the configured one."""
        path, root = info.get("path"), self.config.folder.resolve()
        if not isinstance(path, str):
            raise RequestError("path: must be the folder of the update", "path")
        folder = (root / path).resolve()
        if not folder.is_relative_to(root) or not folder.is_dir():
            raise RequestError(f"path: {path} is not a folder inside that of the backend", "path")
        return _Refusing(_Files(folder))
