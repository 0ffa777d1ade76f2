"""How the weights get from disk into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["LoadConfig"]


@flag_group
class LoadConfig(FlagGroup):
    """How the weights get from disk into memory."""

    title = "LoadConfig"

    load_format: str = flag(
        "auto", "Format of the weights; auto detects it.", kind="loaders", choices=("auto",)
    )
    download_dir: str | None = flag(
        None, "Folder for downloads. Default: the Hugging Face cache.", unit="path"
    )
    model_loader_extra_config: Mapping[str, Any] = flag({}, "Options of the loader.")
    ignore_patterns: tuple[str, ...] = flag(
        ("original/**/*",), "Files to skip when downloading and reading the checkpoint."
    )
    use_tqdm_on_load: bool = flag(True, "Show a progress bar while loading weights.")
