"""Downloads from the Hugging Face hub, with errors that say what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["download", "download_part", "is_hub_id", "split_part"]

log = logging.getLogger("modulm")

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: What a checkpoint is made of, its weights in a form that can hold no code.
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.tiktoken")
#: Weights of repositories that have them in no other form.
_OLDER_WEIGHTS = ("pytorch_model*.bin", "adapter_model.bin")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `owner/name`."""
    return bool(_ID.fullmatch(name)) and "/" in name and not name.startswith(".")


def split_part(name: str) -> tuple[str, str] | None:
    """The hub id and the part of `owner/name:PART`; None for another form."""
    repository, colon, part = name.partition(":")
    return (repository, part) if colon and part and is_hub_id(repository) else None


def download(name: str, config: EngineConfig, wanted: tuple[str, ...] = ()) -> Path:
    """The folder of a hub checkpoint in the local cache, downloaded where it is not there yet.

    wanted: patterns of what is to come beside that which every checkpoint is made of. Raises
    CheckpointError: no such model, not allowed, or no connection and nothing cached.
    """
    with _explained(name, config):
        code = ("*.py",) if config.model.trust_remote_code else ()
        folder = _files(name, config, (*_FILES, *wanted, *code))
        if not any(folder.glob("*.safetensors")):
            _files(name, config, _OLDER_WEIGHTS)
    if config.model.revision != folder.name:
        log.info("model %s is commit %s; --revision names one that stays", name, folder.name)
    return folder


def download_part(
    name: str, config: EngineConfig, choose: Callable[[Sequence[str]], Sequence[str]]
) -> Path:
    """The first of the files that `choose` takes of all that a repository has, in the local cache.

    Raises CheckpointError as `download` does.
    """
    with _explained(name, config):
        wanted = choose(_listed(name, config))
        return _files(name, config, tuple(map(escape, wanted))) / wanted[0]


def _listed(name: str, config: EngineConfig) -> list[str]:
    """The files of a repository; without a connection, those of it in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    revision, token = config.model.revision, config.model.hf_token
    try:
        return sorted(HfApi().list_repo_files(name, revision=revision, token=token))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:
        cached = snapshot_download(  # where it is: no file is called "/", so none is missed
            name,
            revision=revision,
            cache_dir=config.load.download_dir,
            local_files_only=True,
            allow_patterns=["/"],
        )
    found = Path(cached).rglob("*")
    return sorted(path.relative_to(cached).as_posix() for path in found if path.is_file())


def _files(name: str, config: EngineConfig, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        name,
        revision=config.model.revision,
        cache_dir=config.load.download_dir,
        token=config.model.hf_token,
        allow_patterns=list(patterns),
        ignore_patterns=list(config.load.ignore_patterns),
    )
    return Path(found)


@contextmanager
def _explained(name: str, config: EngineConfig) -> Iterator[None]:
    """What the hub's client raises, as a CheckpointError that says what to do."""
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
            f"model {name!r} is gated: accept its terms on the hub and give --hf-token"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no model {name!r} on the hub (a private one needs --hf-token)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"model {name!r} has no revision {config.model.revision!r}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model {name!r} is not in the local cache and the hub cannot be reached "
            f"({type(error).__name__}); give a folder, or download it where there is a connection"
        ) from error
