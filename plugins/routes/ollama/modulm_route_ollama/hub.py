"""Moves models between the hub and the folder of `--models-dir`, with progress."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.loading import open_checkpoint
from modulm.plugins import defaults, manager
from modulm_downloads import is_hub_id
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.models.library import SETTINGS_FILE, ModelLibrary, hub_id, link

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_route_ollama.objects import Status

__all__ = ["HOSTS", "Hub", "file_digest", "hub_name"]

#: Beginnings of names that mean the hub.
HOSTS = ("hf.co/", "huggingface.co/", "https://huggingface.co/")
#: Files of a checkpoint, whose sizes make up the whole of a download.
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.tiktoken")
#: Seconds between two looks at how much has arrived.
_LOOK = 0.5
_PIECE = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")


def hub_name(name: str) -> tuple[str, str]:
    """The hub id and the part, or "", of a model to pull. Raises ApiError(400)."""
    plain = name.removesuffix(":latest")
    for host in HOSTS:
        plain = plain.removeprefix(host)
    repository, _, part = (hub_id(plain) or plain).partition(":")
    if not is_hub_id(repository):
        raise bad_field(
            "model",
            f"model must be a hub id (owner/name, or owner/name:PART for one file of a GGUF "
            f"repository) or a short name of one, not {name!r:.100}",
        )
    return repository, part


def file_digest(path: Path) -> str:
    """The digest of a file, as Ollama writes it."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


class Hub:
    """The hub, for one library. config: the server's, with the token."""

    def __init__(self, config: EngineConfig, store: ModelLibrary) -> None:
        self._config = config.with_(download_dir=str(store.folder))
        self._store = store
        self._token = config.model.hf_token

    async def pull(self, repository: str, part: str) -> AsyncGenerator[Status, None]:
        """Download a model; yields progress. Raises CheckpointError.

        A download that has begun goes on if nobody reads its progress.
        """
        yield {"status": "pulling manifest"}
        total, files = await asyncio.to_thread(self._listed, repository, part)
        digest = f"sha256:{hashlib.sha256(f'{repository}:{part}'.encode()).hexdigest()}"
        head: Status = {"status": f"pulling {digest[7:19]}", "digest": digest, "total": total}
        task = asyncio.create_task(asyncio.to_thread(self._download, repository, part, files))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        shown = -1
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK)
            arrived = min(self._arrived(repository), total)
            if arrived > shown and not task.done():
                shown = arrived
                yield {**head, "completed": arrived}
        task.result()
        yield {**head, "completed": total}
        yield {"status": "writing manifest"}

    def _listed(self, repository: str, part: str) -> tuple[int, frozenset[str]]:
        """The bytes that a download brings, 0 if unknown, and all files of the repository."""
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(repository, files_metadata=True, token=self._token)
        except Exception:  # the download itself says what is wrong
            return 0, frozenset()
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        if part:
            names = defaults.choose_files(manager.current(), repository, part, sorted(sizes))
        else:
            names = [name for name in sizes if any(fnmatch(name, one) for one in _FILES)]
        return sum(sizes[name] for name in names), frozenset(sizes)

    def _arrived(self, repository: str) -> int:
        size = 0
        with suppress(OSError):
            for file in (self._cached(repository) / "blobs").iterdir():
                with suppress(OSError):
                    size += file.stat().st_size
        return size

    def _cached(self, repository: str) -> Path:
        return self._store.folder / f"models--{repository.replace('/', '--')}"

    def _download(self, repository: str, part: str, files: frozenset[str]) -> None:
        name = f"{repository}:{part}" if part else repository
        path = open_checkpoint(self._config.with_(model=name), manager.current()).path
        if SETTINGS_FILE in files:
            self._fetch_settings(repository)
        if not part:
            return
        pieces = sorted(path.parent.glob(_PIECE.sub(r"-*-of-\1", path.name)))

        def fill(folder: Path) -> None:
            for piece in pieces:
                link(piece.resolve(), folder / piece.name)

        self._store.add(name, {"model": f"./{path.name}"}, fill)
        shutil.rmtree(self._cached(repository), ignore_errors=True)

    def _fetch_settings(self, repository: str) -> None:
        """Download the settings of a model that was pushed from a library."""
        from huggingface_hub import hf_hub_download

        for name in (SETTINGS_FILE, "Modelfile"):
            with suppress(Exception):  # the model runs without
                hf_hub_download(repository, name, cache_dir=self._store.folder, token=self._token)

    async def push(self, repository: str, path: Path) -> AsyncGenerator[Status, None]:
        """Upload the files of a folder; yields progress. Raises ApiError."""
        from huggingface_hub import CommitOperationAdd, HfApi

        api: Any = HfApi(token=self._token)
        yield {"status": "retrieving manifest"}
        await self._asked(api.create_repo, repository, exist_ok=True)
        root = path.parent if path.is_file() else path
        files = (
            [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        )
        operations = []
        for file in files:
            name = file.relative_to(root).as_posix()
            operation = CommitOperationAdd(name, str(file.resolve()))
            operations.append(operation)
            digest = await asyncio.to_thread(file_digest, file)
            size = file.stat().st_size
            head: Status = {"status": f"pushing {digest[7:19]}", "digest": digest, "total": size}
            yield {**head, "completed": 0}
            await self._asked(api.preupload_lfs_files, repository, [operation])
            yield {**head, "completed": size}
        yield {"status": "pushing manifest"}
        await self._asked(
            api.create_commit, repository, operations, commit_message="Upload from modulm"
        )

    async def _asked(self, call: Any, *args: Any, **keywords: Any) -> None:
        """Call the hub. Raises ApiError with its reason."""
        try:
            await asyncio.to_thread(call, *args, **keywords)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ApiError(502, f"the hub refuses the upload: {reason[0][:300]}") from error
