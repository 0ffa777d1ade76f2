"""Ollama's library of models, in the folder of `--models-dir`: create, copy, delete, pull, push."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from modulm.errors import CheckpointError, ConfigError
from modulm_route_ollama.hub import HOSTS, Hub, hub_name
from modulm_route_ollama.modelfile import Modelfile, settings_of, written
from modulm_server.api_keys import allows
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.key_limits import current_key
from modulm_server.models.flags import ModelsConfig
from modulm_server.models.library import ModelLibrary, hub_id, is_model_name, link

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from modulm_route_ollama.objects import Status
    from modulm_server.route import RouteContext

__all__ = ["MODELFILE", "Library", "Steps"]

#: A stored Modelfile, in the folder of its model.
MODELFILE = "Modelfile"
Steps = AsyncGenerator["Status", None]

_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
#: Bytes of an upload that are written at a time, and seconds for which unused uploads stay.
_WRITE, _UNUSED = 4 << 20, 86_400.0


class Library:
    """The models that clients may change. The methods raise ApiError."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        flags = context.config.group(ModelsConfig)
        self.writable = context.directory is not None and flags.models_dir_writable
        self.store = ModelLibrary(Path(flags.models_dir or "/nonexistent"))
        self._one_change = asyncio.Lock()

    def check_writable(self) -> None:
        """Raise ApiError(501) unless clients may change the models."""
        if not self.writable:
            raise ApiError(
                501,
                "clients cannot change the models of this server: start it with "
                "--models-dir FOLDER --models-dir-writable",
                code="not_implemented",
            )

    def target(self, name: str | None, field: str = "model") -> str:
        """Check the name of a model that is to be written."""
        plain = (name or "").removesuffix(":latest")
        if not is_model_name(plain):
            raise bad_field(
                field,
                f"{field} must be NAME, OWNER/NAME or one of them with :TAG, of letters, digits, "
                f"'.', '_' and '-', not {name!r:.100}",
            )
        if not allows(current_key(), plain):
            raise ApiError(403, f"this key may not use a model {plain!r}", param=field)
        return plain

    def check_known(self, name: str, owner: str) -> None:
        """Raise ApiError(404) for a model that does not exist for a request's key."""
        self._directory.status(name, owner)

    def described(self, name: str) -> str | None:
        """The Modelfile of a model that a client has created."""
        if not self.store.folder.is_dir():
            return None
        path = self.store.find(name.removesuffix(":latest"))
        file = None if path is None else path / MODELFILE
        return file.read_text(encoding="utf-8") if file is not None and file.is_file() else None

    # Changes.

    async def create(
        self,
        name: str,
        read: Modelfile,
        files: Mapping[str, str],
        adapter_files: Mapping[str, str],
        owner: str,
    ) -> Steps:
        """Create a model, or replace one that was created here."""
        settings, template = await asyncio.to_thread(settings_of, read)
        base = self._stored_name(read.base or "")
        if not base and not files:
            raise bad_field("from", "from must name a model, or files the uploaded files")
        self._check_replaceable(name)
        blobs = self._blobs(files, "files") if files else {}
        adapters = self._blobs(adapter_files, "adapters")
        if read.adapter and not adapters:
            _refuse_path("ADAPTER", read.adapter)
        elsewhere: dict[str, Any] | None = None
        if not blobs:
            async with aclosing(self._available(base, owner)) as steps:
                async for step in steps:
                    yield step
            elsewhere = self._elsewhere(base, owner)
        yield {"status": "reading model metadata"}

        def fill(folder: Path) -> None:
            table: dict[str, Any] = elsewhere or {}
            if blobs:
                table = _place(blobs, folder)
            elif elsewhere is None:
                table = self.store.copy_files(base, folder)
            if adapters:
                _place_adapter(adapters, folder, table)
            if template is not None:
                (folder / "template.jinja").write_text(template, encoding="utf-8")
                table["chat-template"] = "./template.jinja"
                table["chat-template-content-format"] = "string"
            generation = table.get("override-generation-config") or {}
            table |= settings
            if generation or "override-generation-config" in settings:
                new = settings.get("override-generation-config", {})
                table["override-generation-config"] = {**generation, **new}
            text = written(read, base or "./" + sorted(files)[0])
            (folder / MODELFILE).write_text(text, encoding="utf-8")
            tables.update(table)

        tables: dict[str, Any] = {}
        async with self._one_change:
            self._check_replaceable(name)
            await self._leave(name, owner)
            await asyncio.to_thread(self.store.add, name, tables, fill)
            await asyncio.to_thread(self._remove_blobs, {*blobs.values(), *adapters.values()})
            await self._reload()
        for ignored in read.ignored:
            yield {"status": f"{ignored} has no effect here"}
        yield {"status": "success"}

    async def copy(self, source: str, target: str, owner: str) -> None:
        """Copy a model; the copy's files need no more room."""
        elsewhere = self._elsewhere(source, owner)
        tables: dict[str, Any] = {}

        def fill(folder: Path) -> None:
            tables.update(elsewhere or self.store.copy_files(source, folder))

        async with self._one_change:
            self._check_replaceable(target)
            await self._leave(target, owner)
            await asyncio.to_thread(self.store.add, target, tables, fill)
            await self._reload()

    async def delete(self, name: str, owner: str) -> None:
        """Unload a model and remove its files."""
        status = self._directory.status(name, owner)
        async with self._one_change:
            if await asyncio.to_thread(self.store.find, status.name) is None:
                raise ApiError(
                    400,
                    f"model {status.name!r} is not in --models-dir: the server was started with it",
                    param="model",
                )
            await self._directory.unload(status.name, owner)
            await asyncio.to_thread(self.store.remove, status.name)
            await self._reload()

    async def pull(self, name: str) -> Steps:
        """Download a model from the hub: a hub id, one with :PART of a GGUF repository, or a short
        name.
        """
        repository, part = hub_name(name)
        self.target(f"{repository}:{part}" if part else repository)
        hub = Hub(self._context.config, self.store)
        with _explained():
            async with aclosing(hub.pull(repository, part)) as steps:
                async for step in steps:
                    yield step
        async with self._one_change:
            await self._reload()
        yield {"status": "success"}

    async def push(self, name: str) -> Steps:
        """Upload a model to the hub, under its name."""
        if "/" not in name or ":" in name:
            raise bad_field(
                "model", "model must be OWNER/NAME, as on the hub; copy it to that name"
            )
        path = await asyncio.to_thread(self.store.find, name)
        if path is None:
            raise ApiError(404, f"model {name!r} is not in --models-dir", param="model")
        settings = await asyncio.to_thread(self.store.settings, name) or {}
        if not str(settings.get("model", "")).startswith(str(path)):
            raise bad_field("model", f"the weights of {name!r} are not in --models-dir")
        with _explained():
            async with aclosing(Hub(self._context.config, self.store).push(name, path)) as steps:
                async for step in steps:
                    yield step
        yield {"status": "success"}

    def _stored_name(self, name: str) -> str:
        """The name that a model has in the library, or would have when it is pulled."""
        plain = name.removesuffix(":latest")
        for host in HOSTS:
            plain = plain.removeprefix(host)
        return plain if plain in self._names() else hub_id(plain) or plain

    async def _available(self, base: str, owner: str) -> Steps:
        """Pull the model of FROM unless the server has it."""
        if await asyncio.to_thread(self.store.find, base) is not None:
            return
        with suppress(ApiError):
            self._directory.status(base, owner)
            return
        _refuse_path("FROM", base)
        async with aclosing(self.pull(base)) as steps:
            async for step in steps:
                if step["status"] != "success":
                    yield step

    def _elsewhere(self, name: str, owner: str) -> dict[str, Any] | None:
        """The settings of a model that is not in the library; None if it is there. Raises
        ApiError(404).
        """
        if self.store.find(name) is not None:
            self._directory.status(name, owner)
            return None
        return {"model": self._directory.status(name, owner).model}

    def _check_replaceable(self, name: str) -> None:
        """Raise ApiError(409) rather than replace files that no client has put there, and for names
        that the server has elsewhere.
        """
        path = self.store.find(name)
        created = path is not None and (path / MODELFILE).is_file()
        if created or (path is None and name not in self._names()):
            return
        raise ApiError(
            409,
            f"there is a model {name!r}: delete it first, or choose another name",
            param="model",
        )

    def _names(self) -> set[str]:
        return {name for status in self._directory.statuses() for name in status.names}

    async def _leave(self, name: str, owner: str) -> None:
        """Unload a model that is to be replaced."""
        if name in self._names():
            await self._directory.unload(name, owner)

    async def _reload(self) -> None:
        with _explained():
            await self._directory.reload()

    @property
    def _directory(self) -> Any:
        return self._context.directory

    # Uploads.

    def _blob(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise bad_field("digest", "digest must be sha256: and 64 hexadecimal digits")
        return self.store.folder / ".blobs" / f"sha256-{match[1]}"

    def has_blob(self, digest: str) -> bool:
        """Whether a file was uploaded."""
        return self._blob(digest).is_file()

    async def upload(self, digest: str, parts: AsyncIterable[bytes], size: int | None) -> None:
        """Store an uploaded file. size: in bytes, if the client says so."""
        target = self._blob(digest)
        target.parent.mkdir(exist_ok=True)
        await asyncio.to_thread(self._remove_unused)
        if size is not None and size > shutil.disk_usage(target.parent).free:
            raise ApiError(507, f"there is no room for {size} bytes in --models-dir")
        descriptor, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
        part = Path(name)
        try:
            with open(descriptor, "wb") as file:
                received = hashlib.sha256()
                buffer = bytearray()

                def flush() -> None:
                    received.update(buffer)
                    file.write(buffer)
                    buffer.clear()

                async for piece in parts:
                    buffer += piece
                    if len(buffer) >= _WRITE:
                        await asyncio.to_thread(flush)
                await asyncio.to_thread(flush)
            if received.hexdigest() != target.name.removeprefix("sha256-"):
                raise bad_field("digest", "the uploaded file has another digest")
            part.chmod(0o644)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)

    def _blobs(self, files: Mapping[str, str], field: str) -> dict[str, Path]:
        """The uploaded files by their names."""
        found: dict[str, Path] = {}
        for name, digest in files.items():
            path = PurePosixPath(name)
            usable = path.parts and not path.is_absolute() and ".." not in path.parts
            if not usable or len(name) > 256 or "\0" in name:
                raise bad_field(field, f"{field}: {name!r:.100} is not the name of a file")
            blob = self._blob(digest)
            if not blob.is_file():
                raise bad_field(field, f"{field}: {name!r:.100} was not uploaded to /api/blobs")
            found[str(path)] = blob
        return found

    def _remove_blobs(self, blobs: set[Path]) -> None:
        for blob in blobs:
            blob.unlink(missing_ok=True)

    def _remove_unused(self) -> None:
        """Remove uploads of which no model was made in a day."""
        latest = time.time() - _UNUSED
        for path in (self.store.folder / ".blobs").iterdir():
            with suppress(OSError):
                if path.stat().st_mtime < latest:
                    path.unlink()


def _place(blobs: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Put the uploaded files of a checkpoint into its folder; returns the setting that names it."""
    _link(blobs, folder)
    if "config.json" in blobs:
        return {"model": "./"}
    weights = sorted(name for name in blobs if name.endswith(".gguf"))
    if not weights:
        raise bad_field("files", "files must have a .gguf file, or config.json and its weights")
    return {"model": f"./{weights[0]}"}


def _place_adapter(blobs: Mapping[str, Path], folder: Path, table: dict[str, Any]) -> None:
    if "adapter_config.json" not in blobs:
        raise bad_field(
            "adapters", "adapters must be a folder of PEFT: adapter_config.json and its weights"
        )
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    _link(blobs, folder / "adapter")
    table["adapter"] = "./adapter"


def _link(blobs: Mapping[str, Path], folder: Path) -> None:
    for name, blob in blobs.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link(blob, place)


def _refuse_path(command: str, value: str) -> None:
    """Raise ApiError(400) for a path: a client has no business with the server's files."""
    if value.startswith((".", "/", "~", "\\")) or value.endswith((".gguf", ".safetensors")):
        raise bad_field(
            "modelfile",
            f"{command} must not be a path: upload the file by POST to /api/blobs, and name it in "
            "files or adapters, as `ollama create` does",
        )


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors about checkpoints and settings into answers."""
    try:
        yield
    except CheckpointError as error:
        known = "no model" in str(error) or "nor one of" in str(error)
        raise ApiError(404 if known else 502, str(error), param="model") from error
    except ConfigError as error:
        raise ApiError(400, str(error), param=error.field) from error
