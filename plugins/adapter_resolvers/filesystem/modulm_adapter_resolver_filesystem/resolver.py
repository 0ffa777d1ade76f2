"""Resolves adapter NAME to the folder `FOLDER/NAME`, unless it or a file in it links outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from modulm.errors import ConfigError
from modulm_adapter_resolver_filesystem.flags import AdapterFolderConfig
from modulm_adapters.places import inside
from modulm_adapters.resolver import AdapterResolver

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["FilesystemResolver"]

#: Relative paths below the root, without `..`, and their maximum length, which file systems accept.
_NAME, _LONGEST = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII), 255


class FilesystemResolver(AdapterResolver):
    """Resolves names to the adapters of one folder."""

    name: ClassVar[str] = "filesystem"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        setting = config.group(AdapterFolderConfig).lora_resolver_folder
        if setting is None:
            return None
        folder = Path(setting)
        if not folder.is_dir():
            raise ConfigError("lora_resolver_folder", f"{setting} is not a folder")
        return cls(folder)

    def resolve(self, name: str) -> Path | None:
        if len(name) > _LONGEST or not _NAME.fullmatch(name):
            return None
        path = self._folder / name
        if not (path / "adapter_config.json").is_file():
            return None
        return inside(path, [self._folder])
