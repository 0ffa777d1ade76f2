"""Answers `modulm_fetch_checkpoint` for s3://, gs:// and az://."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_fetch_checkpoint"]


@hookimpl
def modulm_fetch_checkpoint(name: str, config: EngineConfig, files: WantedFiles) -> Path | None:
    if "://" not in name:
        return None
    from modulm_downloads import fetch_snapshot
    from modulm_hooks_object_stores.stores import open_folder

    folder = open_folder(name, config)
    return None if folder is None else fetch_snapshot(folder, config, files)
