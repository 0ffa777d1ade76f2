"""Answers `modulm_fetch_checkpoint` for owner/name, unless another plugin does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_fetch_checkpoint"]


@hookimpl(trylast=True)
def modulm_fetch_checkpoint(name: str, config: EngineConfig, files: WantedFiles) -> Path | None:
    from modulm_downloads import headers, hub

    if hub.is_hub_id(name):
        fetch = hub.download if files.headers_in is None else headers.fetch_headers
        return fetch(name, config, files)
    return hub.download_part(name, config, files)
