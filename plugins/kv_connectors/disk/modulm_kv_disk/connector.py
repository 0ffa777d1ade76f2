"""A KV connector that stores blocks as files in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import ge

from modulm.contracts.connector import (
    BlockHold,
    BlockTransfer,
    KVConnector,
    KVIndex,
    KVMover,
)
from modulm_kv_transfer import block_files as files
from modulm_kv_transfer.copies import CopyingMover, TransferFailed
from modulm_kv_transfer.encoder_outputs import (
    EncoderConnector,
    EncoderOutputs,
    EncoderTransfer,
    FileEncoderOutputs,
)
from modulm_kv_transfer.holds import HeldBlocks

__all__ = ["DiskConnector", "DiskOptions"]

#: Blocks in host memory at once on their way between files and a device; one without a device, so
#: that it is still in the processor's cache when it is copied.
_PART = 16


@frozen
class DiskOptions:
    """shared_storage_path: the folder. max_bytes: of all files in it, shared by all engines."""

    shared_storage_path: str = files.FOLDER
    max_bytes: int = field(default=16 << 30, validator=ge(1))

    @property
    def folder(self) -> Path:
        return Path(self.shared_storage_path).expanduser()


class _Index(KVIndex):
    """Looks up files on every call, because other engines write and remove them too."""

    durable = True
    medium = "disk"

    def __init__(self, folder: Path, model: str, ranks: int) -> None:
        self._folder, self._model, self._ranks = folder, model, ranks

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int:
        missing = (index for index, name in enumerate(names) if not self._has(name))
        return next(missing, len(names))

    def _has(self, name: bytes) -> bool:
        paths = (
            files.block_path(self._folder, self._model, rank, self._ranks, name)
            for rank in range(self._ranks)
        )
        return all(os.path.exists(path) for path in paths)


class _Mover(CopyingMover):
    """Writes and reads this rank's files."""

    def __init__(self, options: DiskOptions, model: str, share: float, per_key: float) -> None:
        super().__init__()
        self._shares = share, per_key
        self._folder, self._most, self._model = options.folder, options.max_bytes, model
        self._total = self._written = 0

    def prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._total = files.evict(self._folder, self._most)
        self._part = _PART if self.copier.staged else 1
        self._buffer = self.copier.buffer(self._part * self.loaders)
        self._bytes = [memoryview(row.numpy()) for row in self._buffer]
        blocks = self._most // self.ranks // (self.copier.width + files.OVERHEAD)
        self._held = HeldBlocks(blocks, *self._shares, self._release)

    def _path(self, name: bytes) -> Path:
        return files.block_path(self._folder, self._model, self.rank, self.ranks, name)

    def _described(self, name: bytes) -> dict[str, object]:
        return {
            "model": self._model, "layout": self.copier.layout, "rank": self.rank,
            "ranks": self.ranks, "name": name.hex(),
        }  # fmt: skip

    def save(self, transfer: BlockTransfer) -> None:
        new = []
        for index, name in enumerate(transfer.names):
            try:
                files.touch(self._path(name))
            except FileNotFoundError:
                new.append(index)
        for start in range(0, len(new), self._part):
            part = new[start : start + self._part]
            blocks = [[ids[index] for index in part] for ids in transfer.blocks]
            self.copier.save(blocks, list(self._buffer[: len(part)]))
            self.synchronize()
            for row, index in enumerate(part):
                self._write(transfer.names[index], self._bytes[row])

    def _write(self, name: bytes, payload: memoryview) -> None:
        """Write a file after making room for it."""
        if self._total + len(payload) > self._most or self._written > self._most // 16:
            self._total = files.evict(self._folder, self._most * 7 // 8 - len(payload))
            self._written = 0
        if self._total + len(payload) > self._most:
            raise TransferFailed(f"{self._most} bytes are too small for a block")
        size = files.write(self._path(name), self._described(name), payload)
        self._total += size
        self._written += size

    def load(self, transfer: BlockTransfer) -> None:
        def load(number: int, part: range) -> None:
            for start in range(part.start, part.stop, self._part):
                at = slice(start, min(start + self._part, part.stop))
                names, row = transfer.names[at], number * self._part
                for offset, name in enumerate(names):
                    self._read(name, self._bytes[row + offset])
                rows = list(self._buffer[row : row + len(names)])
                self.copier.load([ids[at] for ids in transfer.blocks], rows)
                self.synchronize()

        self.spread(len(transfer.names), load)

    def _read(self, name: bytes, into: memoryview) -> None:
        """Read a file into `into`; removes a damaged one. Raises TransferFailed."""
        path = self._path(name)
        try:
            files.read(path, self._described(name), into)
            files.touch(path)
        except FileNotFoundError as error:
            raise TransferFailed(f"{path.name} was removed") from error
        except files.BadFile as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise TransferFailed(str(error)) from error

    def hold(self, hold: BlockHold) -> None:
        # The end of a prefix is evicted before its beginning.
        for name in reversed(self._held.hold(hold)):
            with contextlib.suppress(OSError):
                files.hold(self._path(name), hold.seconds)

    def _release(self, names: Sequence[bytes]) -> None:
        """Let the files of blocks be evicted again."""
        for name in reversed(names):
            with contextlib.suppress(OSError):
                files.release(self._path(name))


class DiskConnector(KVConnector, EncoderConnector):
    """Stores blocks and encoder outputs in files, for all engines on the host, and later ones."""

    name: ClassVar[str] = "disk"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = DiskOptions

    config: DiskOptions
    _model, _ranks, _shares = "", 1, (0.0, 0.0)

    def bind(self, model: str, ranks: int) -> None:
        self._model, self._ranks = model, ranks

    def limit_holds(self, share: float, per_key: float) -> None:
        self._shares = share, per_key

    def index(self) -> KVIndex:
        return _Index(self.config.folder, self._model, self._ranks)

    def mover(self) -> KVMover:
        return _Mover(self.config, self._model, *self._shares)

    def encoder_outputs(self, transfer: EncoderTransfer) -> EncoderOutputs:
        return FileEncoderOutputs(self.config.folder, self.config.max_bytes, transfer.model)
