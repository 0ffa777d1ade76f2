"""Downloads from the Hugging Face hub, with errors that say what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from modulm.config import EngineConfig

__all__ = ["download", "is_hub_id"]

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: What a checkpoint is made of, its weights in a form that can hold no code. An encoding of
#: messages that is written in Python is read for its texts, and never run.
_FILES = ("*.json", "*.jinja", "*.model", "*.model.v*", "*.txt", "*.safetensors", "*.tiktoken",
          "encoding/*.py")  # fmt: skip
#: Weights of repositories that have them in no other form.
_OLDER_WEIGHTS = ("pytorch_model*.bin", "adapter_model.bin")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `owner/name`."""
    return bool(_ID.fullmatch(name)) and "/" in name and not name.startswith(".")


def download(name: str, config: EngineConfig) -> Path:
    """The folder of a hub checkpoint in the local cache, downloaded where it is not there yet.

    Raises CheckpointError: no such model, not allowed, or no connection and nothing cached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def files(patterns: tuple[str, ...]) -> Path:
        found = snapshot_download(
            name,
            revision=config.model.revision,
            cache_dir=config.load.download_dir,
            token=config.model.hf_token,
            allow_patterns=list(patterns),
            ignore_patterns=list(config.load.ignore_patterns),
        )
        return Path(found)

    try:
        folder = files(_FILES + (("*.py",) if config.model.trust_remote_code else ()))
        if not any(folder.glob("*.safetensors")):
            files(_OLDER_WEIGHTS)
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
    return folder
