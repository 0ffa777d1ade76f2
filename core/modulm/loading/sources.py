"""Download checkpoints through the plugins that know where a name leads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.contracts.checkpoint import WantedFiles
from modulm.errors import CheckpointError
from modulm.plugins import defaults, manager

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["download", "fetch", "tokenizer_path"]

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
#: Weights in formats that cannot hold code, and those of checkpoints that have no other format.
_WEIGHTS, _OLDER_WEIGHTS = ("*.safetensors",), ("pytorch_model*.bin", "adapter_model.bin")


def fetch(
    name: str,
    config: EngineConfig,
    plugins: PluginManager | None = None,
    more: tuple[str, ...] = (),
    *,
    weights: bool = True,
    headers_in: Path | None = None,
) -> Path | None:
    """Download what a name such as `owner/name` or `s3://bucket/folder` stands for, unless it is in
    the local cache.

    more: patterns of additional files. headers_in: see `WantedFiles`. Returns None if no installed
    plugin knows the name. Raises CheckpointError if the download fails.
    """
    plugins = plugins or manager.current()
    code = ("*.py",) if config.model.trust_remote_code else ()
    patterns = (*_SMALL, *(_WEIGHTS if weights else ()), *more, *code)
    choose = partial(defaults.choose_files, plugins)
    files = WantedFiles(patterns, _OLDER_WEIGHTS if weights else (), choose, headers_in)
    path = plugins.hook.modulm_fetch_checkpoint(name=name, config=config, files=files)
    return path if isinstance(path, Path) else None


def download(name: str, config: EngineConfig, more: tuple[str, ...] = ()) -> Path:
    """Download a checkpoint as `fetch` does. Raises CheckpointError for unknown names, too."""
    if (path := fetch(name, config, more=more)) is None:
        raise CheckpointError(f"{name!r} is neither a folder nor a name of an installed source")
    return path


def tokenizer_path(config: EngineConfig, path: Path | str) -> str:
    """Return the folder of `--tokenizer`, downloaded if needed; `path` if the flag is not set."""
    name = config.model.tokenizer
    if name is None or Path(name).expanduser().exists():
        return str(path) if name is None else name
    revised = config.with_(revision=config.model.tokenizer_revision)
    return str(fetch(name, revised, weights=False) or name)
