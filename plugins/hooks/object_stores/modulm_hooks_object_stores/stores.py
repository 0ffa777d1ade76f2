"""Folders in buckets, through fsspec. Each store's client finds its own credentials.

Sources: https://s3fs.readthedocs.io, https://gcsfs.readthedocs.io, https://github.com/fsspec/adlfs
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.errors import CheckpointError, ConfigError
from modulm.plugins.index import to_install
from modulm_downloads.snapshots import RemoteFile, RemoteFolder, Unreachable
from modulm_hooks_object_stores.flags import ObjectStoreConfig

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

    from modulm.contracts.config import EngineConfig

__all__ = ["STORES", "Store", "StoreFolder", "open_folder"]


@frozen
class Store:
    """One kind of store: the package of its client, and where that looks for credentials."""

    package: str
    credentials: str
    endpoint: str


STORES: Mapping[str, Store] = {
    "s3": Store(
        "s3fs",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "AWS_ENDPOINT_URL names another endpoint",
    ),
    "gs": Store(
        "gcsfs",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "STORAGE_EMULATOR_HOST names another endpoint",
    ),
    "az": Store(
        "adlfs",
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or "
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_CONNECTION_STRING may name another endpoint",
    ),
}
_MD5 = re.compile("[0-9a-f]{32}")
#: Names of exceptions of the clients, which are not imported for this.
_NO_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "TokenRetrievalError", "DefaultCredentialsError", "RefreshError", "ClientAuthenticationError",
    "PermissionError", "Forbidden",
)  # fmt: skip
_NO_CONNECTION = (
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionError",
    "ClientConnectorError", "ClientConnectionError", "ServiceRequestError", "ConnectionClosedError",
    "TimeoutError", "TransportError", "gaierror",
)  # fmt: skip


def open_folder(name: str, config: EngineConfig) -> RemoteFolder | None:
    """Return the remote folder of `SCHEME://bucket/path`; None for schemes of no object store.

    Raises CheckpointError if the client's package is missing, ConfigError for invalid options.
    """
    scheme, _, path = name.partition("://")
    store = STORES.get(scheme)
    if store is None:
        return None
    if config.model.revision is not None:
        raise ConfigError(
            "revision", f"{name} has no revisions: name the folder of the version that you want"
        )
    if not path.strip("/"):
        raise CheckpointError(f"{name}: must be {scheme}://BUCKET/FOLDER")
    options = config.group(ObjectStoreConfig).object_store_options
    if unknown := sorted(set(options) - set(STORES)):
        raise ConfigError(
            "object_store_options", f"{unknown[0]!r} is no scheme: use {', '.join(STORES)}"
        )
    arguments = options.get(scheme) or {}
    if not isinstance(arguments, Mapping):
        raise ConfigError("object_store_options", f"{scheme}: must be a table")
    import fsspec

    try:
        client = fsspec.filesystem(scheme, **{"use_listings_cache": False, **arguments})
    except ImportError as error:
        raise CheckpointError(
            f"{name}: {scheme}:// needs the package {store.package}"
            + to_install(f"modulm-hooks-object-stores[{scheme}]")
        ) from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name}: {store.package} cannot be set up: {error} (it needs {store.credentials}; "
            "--object-store-options passes other arguments)"
        ) from error
    return StoreFolder(name, str(client._strip_protocol(name)).rstrip("/"), client, store)


class StoreFolder(RemoteFolder):
    """A folder, or a single file, of an fsspec file system.

    path: with the bucket, without the scheme.
    """

    def __init__(self, name: str, path: str, client: AbstractFileSystem, store: Store) -> None:
        self.name, self._path, self._client, self._store = name, path, client, store
        account = getattr(client, "account_name", None) or ""
        stated = hashlib.sha256(f"{name} {account} {_endpoint(client)}".encode()).hexdigest()[:12]
        readable = re.sub(r"[^\w.-]+", "--", name)[-80:].strip("-.")
        self.key = f"{readable}-{stated}"

    def files(self) -> Sequence[RemoteFile]:
        with self._explained():
            found = self._client.find(self._path, detail=True)
            self.is_file = list(found) == [self._path]
            entries = {path: entry for path, entry in found.items() if entry["type"] == "file"}
        return [
            _described(path.rpartition("/")[2] if self.is_file else self._below(path), entry)
            for path, entry in sorted(entries.items())
            if self.is_file or self._below(path)
        ]

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        path = self._path if self.is_file else f"{self._path}/{file.name}"
        if start == end:
            return b""
        with self._explained():
            data: bytes = self._client.cat_file(path, start=start, end=end)
            return data

    def is_damaged(self, file: RemoteFile, digest: str) -> bool:
        """Whether S3's ETag is a checksum; it is none of files encrypted with keys of AWS."""
        head = getattr(self._client, "call_s3", None)
        if head is None:
            return True
        bucket, _, key = f"{self._path}/{file.name}".partition("/")
        if self.is_file:
            bucket, _, key = self._path.partition("/")
        with self._explained():
            stated = self._client.call_s3("head_object", Bucket=bucket, Key=key)
        kms = str(stated.get("ServerSideEncryption", "")).startswith("aws:kms")
        return not (kms or stated.get("SSECustomerAlgorithm"))

    def _below(self, path: str) -> str:
        """Return a listed path without that of the folder; "" for the folder's own marker."""
        return path.removeprefix(self._path).strip("/")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert exceptions of the clients to CheckpointErrors with advice."""
        try:
            yield
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: BaseException) -> CheckpointError:
        names, reasons = set(), []
        cause: BaseException | None = error
        while cause is not None:
            names |= {cls.__name__ for cls in type(cause).__mro__}
            reasons.append(str(cause) or type(cause).__name__)
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        store, reason = self._store, reasons[0].partition("\n")[0]
        if names.intersection(_NO_CREDENTIALS) or _is_denied(reasons):
            return CheckpointError(
                f"{self.name}: access denied ({reason}): set {store.credentials}, or for public "
                "buckets --object-store-options "
                f'\'{{"{self.name.partition("://")[0]}": {{"anon": true}}}}\''
            )
        if "FileNotFoundError" in names:
            return CheckpointError(f"{self.name}: no such bucket, folder or file ({reason})")
        if names.intersection(_NO_CONNECTION):
            return Unreachable(
                f"{self.name}: the store cannot be reached ({reason}); {store.endpoint}"
            )
        return CheckpointError(f"{self.name}: {type(error).__name__}: {reason}")


def _is_denied(reasons: Sequence[str]) -> bool:
    words = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Access Denied")
    return any(word in reason for reason in reasons for word in words)


def _endpoint(client: AbstractFileSystem) -> str:
    """Return which server a client talks to, if it is not the store's own."""
    return str(getattr(client, "endpoint_url", None) or "")


def _described(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    """Describe a file from its entry in a listing: S3's, Google's or Azure's."""
    etag = str(entry.get("ETag") or entry.get("etag") or "").strip('"')
    changed = entry.get("LastModified") or entry.get("last_modified") or entry.get("updated")
    stated = entry.get("md5Hash") or (entry.get("content_settings") or {}).get("content_md5")
    digest = _md5(stated)
    if digest is None and "ETag" in entry and _MD5.fullmatch(etag):
        digest = etag  # S3: of files uploaded in one piece
    version = digest or etag or str(entry.get("generation") or changed or entry.get("created"))
    return RemoteFile(name, int(entry["size"]), version, digest and ("md5", digest))


def _md5(stated: object) -> str | None:
    """Return a checksum in hexadecimal digits; stores give it in base64, or as bytes."""
    if isinstance(stated, bytes | bytearray):
        return bytes(stated).hex()
    if isinstance(stated, str):
        with suppress(binascii.Error):
            return base64.b64decode(stated, validate=True).hex()
    return None
