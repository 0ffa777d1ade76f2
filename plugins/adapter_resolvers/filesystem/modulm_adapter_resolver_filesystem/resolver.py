"""`FOLDER/NAME` is the adapter NAME, if it is one and if neither it nor a file of it is a link to
somewhere else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from modulm.errors import ConfigError
from modulm_adapter_resolver_filesystem.flags import AdapterFolderConfig
from modulm_adapters.places import inside
from modulm_adapters.resolver import AdapterResolver

if TYPE_CHECKING:
    from modulm.config import EngineConfig

__all__ = ["FilesystemResolver"]

#: Folders below the folder, by plain names.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)


class FilesystemResolver(AdapterResolver):
    """Adapters in one folder."""

    name: ClassVar[str] = "filesystem"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        given = config.group(AdapterFolderConfig).lora_resolver_folder
        if given is None:
            return None
        folder = Path(given)
        if not folder.is_dir():
            raise ConfigError("lora_resolver_folder", f"{given} is no folder")
        return cls(folder)

    def resolve(self, name: str) -> Path | None:
        if not _NAME.fullmatch(name):
            return None
        path = self._folder / name
        if not (path / "adapter_config.json").is_file():
            return None
        return inside(path, [self._folder])
