"""Encoder outputs outside an engine: stored in files, and by some connectors sent to other engines.

An engine with the role `ec_producer` stores what its encoders compute; one with `ec_consumer` loads
it instead of running its encoders. `ec_both` does both.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import frozen

from modulm_kv_transfer import block_files as files

__all__ = ["EncoderConnector", "EncoderOutputs", "EncoderTransfer", "FileEncoderOutputs"]

log = logging.getLogger("modulm.engine")

#: Element types of stored outputs.
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16)}


@frozen
class EncoderTransfer:
    """Which encoder outputs an engine stores and loads.

    model: a digest of `facts`, 32 hex digits. facts: what outputs depend on besides the item, by
    flag; see `modulm_kv_transfer.identity.encoder_facts`. produces: whether outputs are stored.
    consumes: whether they are loaded. replica: number of this replica on its machine. host, port:
    `ec_ip` and `ec_port`.
    """

    model: str
    facts: Mapping[str, str]
    produces: bool
    consumes: bool
    replica: int = 0
    host: str = "127.0.0.1"
    port: int = 14579


class EncoderOutputs(ABC):
    """Stored encoder outputs of one model, by the hashes of their items (`MediaItem.hash`).

    remote: whether outputs may be on other hosts, so that requests wait for `fetch`.
    """

    remote: ClassVar[bool] = False

    # In the workers.

    @abstractmethod
    def load(self, item: bytes) -> torch.Tensor | None:
        """Return an item's output, [tokens, width] on the CPU, or None. Must not wait for others.

        All ranks load the same items; what one of them lacks is computed.
        """

    @abstractmethod
    def save(self, item: bytes, output: torch.Tensor) -> None:
        """Store an output before returning. Raises OSError. Called on one rank."""

    # Beside the scheduler.

    def start(self) -> None:
        """Start to answer other engines. Called once, in the engine's process. Raises
        ConfigError.
        """

    def fetch(self, request: str, items: Sequence[bytes]) -> bool:
        """Bring a waiting request's items to this host, in the background.

        Returns whether that has ended, one way or the other; called again until then.
        """
        return True

    def finish(self, request: str) -> None:
        """Called when the request has ended."""

    def close(self) -> None:
        """Release resources; may be called twice."""


class EncoderConnector(ABC):
    """A KV connector that also stores encoder outputs (`--ec-transfer-config`)."""

    @abstractmethod
    def encoder_outputs(self, transfer: EncoderTransfer) -> EncoderOutputs:
        """Build the store. Called in each process."""


class FileEncoderOutputs(EncoderOutputs):
    """Outputs in files of a folder that engines of a host share, as blocks are.

    most: bytes of all files in the folder.
    """

    def __init__(self, folder: Path, most: int, model: str) -> None:
        self._folder, self._most, self._model = folder, most, model
        self._unchecked, self._lock, self._warned = most, threading.Lock(), False

    def path(self, item: bytes) -> Path:
        """Return the path of an item's file."""
        name = hashlib.blake2b(item, digest_size=32).digest()
        return files.block_path(self._folder, self._model, 0, 1, name)

    def has(self, item: bytes) -> bool:
        """Whether there is a file of the item."""
        return self.path(item).exists()

    def load(self, item: bytes) -> torch.Tensor | None:
        path = self.path(item)
        try:
            shape, dtype, payload = self.read(item)
            files.touch(path)
        except FileNotFoundError:
            return None
        except (files.BadFile, OSError) as error:
            self.warn(f"an encoder output cannot be read and is computed: {error}")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return torch.frombuffer(payload, dtype=_DTYPES[dtype]).view(*shape)

    def read(self, item: bytes) -> tuple[tuple[int, int], str, bytearray]:
        """Return shape, dtype and bytes of a file. Raises BadFile, OSError."""
        path = self.path(item)
        header, size = files.describe(path)
        shape, dtype = header.get("shape"), header.get("dtype")
        if not isinstance(shape, list) or not isinstance(dtype, str) or dtype not in _DTYPES:
            raise files.BadFile(f"{path.name}: shape or dtype is missing")
        if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
            raise files.BadFile(f"{path.name}: shape is {shape}")
        if shape[0] * shape[1] * _DTYPES[dtype].itemsize != size:
            raise files.BadFile(f"{path.name}: {size} bytes for {shape[0]} x {shape[1]} {dtype}")
        payload = bytearray(size)
        files.read(path, self._described(item, shape, dtype), memoryview(payload))
        return (shape[0], shape[1]), dtype, payload

    def save(self, item: bytes, output: torch.Tensor) -> None:
        output = output.detach().to("cpu").contiguous()
        dtype = str(output.dtype).removeprefix("torch.")
        if dtype in _DTYPES and output.numel() and not self._touched(item):
            payload = output.view(torch.uint8).view(-1).numpy().data
            self.write(item, tuple(output.shape), dtype, payload)

    def _touched(self, item: bytes) -> bool:
        """Mark a stored item as used; False if it is not stored."""
        with contextlib.suppress(OSError):
            files.touch(self.path(item))
            return True
        return False

    def write(
        self, item: bytes, shape: Sequence[int], dtype: str, payload: memoryview | bytearray
    ) -> None:
        """Write a file after making room for it. Raises OSError."""
        if len(payload) > self._most * 7 // 8:
            raise OSError(f"{self._most} bytes are too small for an output of {len(payload)}")
        with self._lock:
            self._unchecked += len(payload)
            if self._unchecked > self._most // 16:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                files.evict(self._folder, self._most * 7 // 8 - len(payload))
                self._unchecked = len(payload)
        described = self._described(item, list(shape), dtype)
        files.write(self.path(item), described, memoryview(payload))

    def _described(self, item: bytes, shape: Sequence[int], dtype: str) -> Mapping[str, Any]:
        kind = "encoder output"
        described = {"kind": kind, "model": self._model, "item": item.hex()}
        return {**described, "shape": list(shape), "dtype": dtype}

    def warn(self, message: str) -> None:
        """Log a warning, the first time; further ones for debugging."""
        log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", message)
        self._warned = True
