"""Answers `modulm_fetch_checkpoint` for modelscope://owner/name, and for owner/name with
--use-modelscope.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from modulm.plugins import hookimpl
from modulm_hooks_modelscope.flags import ModelScopeConfig

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_fetch_checkpoint"]

_SCHEME = "modelscope://"
_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::(.+))?")


@hookimpl
def modulm_fetch_checkpoint(name: str, config: EngineConfig, files: WantedFiles) -> Path | None:
    flags = config.group(ModelScopeConfig)
    if not flags.use_modelscope and not name.startswith(_SCHEME):
        return None
    parted = _ID.fullmatch(name.removeprefix(_SCHEME))
    if parted is None:
        return None
    from modulm_downloads import fetch_snapshot
    from modulm_hooks_modelscope.client import ModelScopeFolder

    repository, part = parted.groups()
    folder = ModelScopeFolder(repository, config.model.revision, flags.modelscope_token)
    if part is None:
        return fetch_snapshot(folder, config, files)
    return fetch_snapshot(folder, config, files, part=(repository, part))
