"""Download checkpoints through the plugins that know where a name leads."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.checkpoint import WantedFiles
from modulm.errors import CheckpointError, PluginError
from modulm.plugins import defaults, manager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["download", "fetch", "tokenizer_path"]

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


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
    of_tokenizers = (one for each in _drivers(plugins, "tokenizers") for one in each.files)
    wanted, fallback = _weights(config, plugins) if weights else ((), ())
    patterns = (*_SMALL, *wanted, *of_tokenizers, *more, *code)
    choose = partial(defaults.choose_files, plugins)
    files = WantedFiles(patterns, wanted, fallback, choose, headers_in)
    path = plugins.hook.modulm_fetch_checkpoint(name=name, config=config, files=files)
    return path if isinstance(path, Path) else None


def _weights(config: EngineConfig, plugins: PluginManager) -> tuple[tuple[str, ...], ...]:
    """Return the patterns of weights, and those to use where there are no such files."""
    name = config.load.load_format
    if name != "auto" and (downloads := plugins.load("loaders", name).downloads) is not None:
        return downloads, ()
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for loader in _drivers(plugins, "loaders"):
        found[loader.fallback].update(loader.downloads or ())
    return tuple(sorted(found[False])), tuple(sorted(found[True]))


def _drivers(plugins: PluginManager, kind: str) -> Iterator[Any]:
    """Yield the installed drivers. Broken ones are reported when they are needed."""
    for declared in plugins.names(kind):
        with suppress(PluginError):
            yield plugins.load(kind, declared.name)


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
