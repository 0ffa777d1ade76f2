"""Repositories of ModelScope through its HTTP API.

Names of paths, parameters and fields as in the package `modelscope` 1.40 (`modelscope.hub`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import httpx

from modulm.config.environ import variables
from modulm.errors import CheckpointError
from modulm_downloads.snapshots import RemoteFile, RemoteFolder, Unreachable

__all__ = ["ModelScopeFolder"]

_ENDPOINT = "https://www.modelscope.cn"
_TOKEN = "MODELSCOPE_API_TOKEN"
#: Most files that the service lists in one answer; it does not say that it left some out.
_LISTED = 3000
_SECONDS = 60.0


class ModelScopeFolder(RemoteFolder):
    """A model's repository at a revision; "master" is the newest.

    Uses MODELSCOPE_ENDPOINT or MODELSCOPE_DOMAIN instead of the service's address.
    """

    def __init__(self, repository: str, revision: str | None, token: str | None) -> None:
        self.name = f"modelscope://{repository}"
        self._endpoint = endpoint()
        self._revision = revision or "master"
        stated = f"{self._endpoint} {repository} {self._revision}"
        digest = hashlib.sha256(stated.encode()).hexdigest()[:12]
        self.key = f"modelscope--{repository.replace('/', '--')}-{digest}"
        self._path = f"/api/v1/models/{repository}/repo"
        token = token or variables().get(_TOKEN)
        cookies = httpx.Cookies()
        if token:
            host = httpx.URL(self._endpoint).host
            cookies.set("m_session_id", token, domain=host if "." in host else "")
        self._client = httpx.Client(
            base_url=self._endpoint, cookies=cookies, follow_redirects=True, timeout=_SECONDS
        )

    def files(self) -> Sequence[RemoteFile]:
        parameters = {"Revision": self._revision, "Recursive": "True"}
        entries = self._entries(parameters)
        if len(entries) >= _LISTED:
            raise CheckpointError(
                f"{self.name}: has more files than the service lists ({_LISTED}); download it with "
                "the package modelscope, and use the folder"
            )
        return [_described(entry) for entry in entries if entry.get("Type") != "tree"]

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        if start == end:
            return b""
        answer = self._get(
            self._path,
            {"Revision": self._revision, "FilePath": file.name},
            {"Range": f"bytes={start}-{end - 1}"},
        )
        return answer.content if answer.status_code == 206 else answer.content[start:end]

    def _entries(self, parameters: dict[str, str]) -> list[dict[str, Any]]:
        """Return the files and folders that the service lists."""
        answer = self._get(f"{self._path}/files", parameters)
        try:
            data = answer.json()["Data"]
            entries = data["Files"] if isinstance(data, dict) else data
            return [entry for entry in entries if isinstance(entry["Path"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.name}: {self._endpoint} gave no list of files ({error!r})"
            ) from error

    def _get(
        self, path: str, parameters: dict[str, str], headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Request a path. Raises CheckpointError with advice, Unreachable without a connection."""
        try:
            answer = self._client.get(path, params=parameters, headers=headers)
        except httpx.TransportError as error:
            raise Unreachable(
                f"{self.name}: ModelScope cannot be reached at {self._endpoint} "
                f"({type(error).__name__}); MODELSCOPE_ENDPOINT names another address, and "
                "without --use-modelscope names lead to Hugging Face"
            ) from error
        if answer.status_code in (401, 403):
            raise CheckpointError(f"{self.name}: access denied: set {_TOKEN} or --modelscope-token")
        if answer.status_code == 404:
            raise CheckpointError(
                f"{self.name}: no such model or revision ({self._revision}) on ModelScope; private "
                f"models need {_TOKEN}"
            )
        if answer.status_code >= 500:
            raise Unreachable(f"{self.name}: {self._endpoint} answered {answer.status_code}")
        if answer.is_error:
            raise CheckpointError(
                f"{self.name}: {self._endpoint} answered {answer.status_code}: {answer.text[:200]}"
            )
        return answer


def endpoint() -> str:
    """Return the address of the service."""
    table = variables()
    address = table.get("MODELSCOPE_ENDPOINT") or table.get("MODELSCOPE_DOMAIN") or _ENDPOINT
    return address.rstrip("/") if "://" in address else f"https://{address}"


def _described(entry: dict[str, Any]) -> RemoteFile:
    digest = str(entry.get("Sha256") or "").lower()
    version = digest or str(entry.get("Revision") or entry.get("CommittedDate"))
    checksum = ("sha256", digest) if digest else None
    return RemoteFile(entry["Path"], int(entry.get("Size") or 0), version, checksum)
