"""Checkpoints without their weights: small files, and the headers of safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.errors import CheckpointError
from modulm_downloads.hub import download, explained

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.config import EngineConfig

__all__ = ["SUFFIX", "fetch_headers", "write_header"]

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
#: Suffix of files whose header can be read alone.
SUFFIX = ".safetensors"


def fetch_headers(name: str, config: EngineConfig, files: WantedFiles) -> Path:
    """Return a folder with the small files of a hub checkpoint and the headers of its weights:
    `files.headers_in`, or the local cache if all weights are there.

    Raises CheckpointError if the hub cannot be reached or the weights have another format.
    """
    if _is_cached(config) or files.headers_in is None:
        return download(name, config, files)
    with explained(name, config):
        _fetch(config, files.headers_in)
    return files.headers_in


def _is_cached(config: EngineConfig) -> bool:
    """Whether all weight files are in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                config.model.model,
                revision=config.model.revision,
                cache_dir=config.load.download_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return False
    index = folder / f"model{SUFFIX}.index.json"
    if index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / file).exists() for file in files)
    return any(folder.glob(f"*{SUFFIX}"))


def _fetch(config: EngineConfig, folder: Path) -> None:
    """Download the small files, and write a file with the header of each weight file."""
    from huggingface_hub import HfApi, snapshot_download

    name, revision = config.model.model, config.model.revision
    token = config.model.hf_token
    hub = HfApi(token=token)
    snapshot_download(
        name, revision=revision, token=token, allow_patterns=list(_SMALL), local_dir=folder
    )
    files = hub.list_repo_files(name, revision=revision)
    weights = [file for file in files if file.endswith(SUFFIX) and "/" not in file]
    if not weights:
        raise CheckpointError(
            f"model {name!r} has no safetensors files, whose headers can be read alone; download "
            f"it (modulm pull {name}) and run this again"
        )
    for file in weights:
        header = hub.parse_safetensors_file_metadata(name, file, revision=revision)
        tensors = {
            tensor: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": list(info.data_offsets),
            }
            for tensor, info in header.tensors.items()
        }
        write_header(folder / file, {"__metadata__": dict(header.metadata), **tensors})


def write_header(file: Path, header: dict[str, object]) -> None:
    """Write a safetensors file without data. The file is as long as the whole one, but sparse."""
    text = json.dumps(header).encode()
    end = max((info["data_offsets"][1] for name, info in header.items()  # type: ignore[index]
               if name != "__metadata__"), default=0)  # fmt: skip
    with file.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        target.truncate(8 + len(text) + end)
