"""Download from the Hugging Face hub, with actionable errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.config import EngineConfig

__all__ = ["download", "download_part", "explained", "is_hub_id", "split_part"]

log = logging.getLogger("modulm")

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `owner/name`."""
    return bool(_ID.fullmatch(name)) and "/" in name and not name.startswith(".")


def split_part(name: str) -> tuple[str, str] | None:
    """Return the hub id and the part of `owner/name:PART`; None for other forms."""
    repository, colon, part = name.partition(":")
    return (repository, part) if colon and part and is_hub_id(repository) else None


def download(name: str, config: EngineConfig, files: WantedFiles) -> Path:
    """Return the folder of a hub checkpoint in the local cache; downloads it if needed.

    Raises CheckpointError if the model does not exist, access is denied, or the hub cannot be
    reached and nothing is cached.
    """
    with explained(name, config):
        folder = _files(name, config, files.patterns)
        if files.fallback and not any(any(folder.glob(one)) for one in files.weights):
            _files(name, config, files.fallback)
    if config.model.revision != folder.name:
        log.info("model %s is at commit %s; use --revision to pin it", name, folder.name)
    return folder


def download_part(name: str, config: EngineConfig, files: WantedFiles) -> Path | None:
    """Download the files that a loader selects for `owner/name:PART`; return the first one's path,
    or None for a name of another form.

    Raises CheckpointError as `download` does.
    """
    parted = split_part(name)
    if parted is None:
        return None
    repository, part = parted
    with explained(repository, config):
        chosen = files.choose(repository, part, _listed(repository, config))
        return _files(repository, config, tuple(map(escape, chosen))) / chosen[0]


def _listed(name: str, config: EngineConfig) -> list[str]:
    """Return the files of a repository; without a connection, the cached ones."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    revision, token = config.model.revision, config.model.hf_token
    try:
        return sorted(HfApi().list_repo_files(name, revision=revision, token=token))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:
        # returns the cache folder: no file is called "/", so nothing is missing
        cached = snapshot_download(
            name,
            revision=revision,
            cache_dir=config.load.download_dir,
            local_files_only=True,
            allow_patterns=["/"],
        )
    paths = Path(cached).rglob("*")
    return sorted(path.relative_to(cached).as_posix() for path in paths if path.is_file())


def _files(name: str, config: EngineConfig, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name,
        revision=config.model.revision,
        cache_dir=config.load.download_dir,
        token=config.model.hf_token,
        allow_patterns=list(patterns),
        ignore_patterns=list(config.load.ignore_patterns),
    )
    return Path(folder)


@contextmanager
def explained(name: str, config: EngineConfig) -> Iterator[None]:
    """Convert exceptions of the hub's client to CheckpointErrors with advice."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {name!r} is gated: accept its terms on the hub and set --hf-token"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no model {name!r} on the hub (private models need --hf-token)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"model {name!r} has no revision {config.model.revision!r}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model {name!r} is not in the local cache and the hub cannot be reached "
            f"({type(error).__name__}); use a local folder, or download it with a connection"
        ) from error
